"""The one way in which this package compiles a function, with a cache that can help and do nothing else.

numba keeps what it has compiled in files. Left to itself it refuses to define a function where it finds no
place for them; an index that is damaged ends every process that looks into it; machine code of which a bit
has changed is run, and so is code into which an older release of another module was compiled. Here whatever
goes wrong with the cache is a miss: the function is compiled, and kept if it can be.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar, cast, final, overload

from numba import njit
from numba.core.caching import FunctionCache, IndexDataCacheFile, NullCache

from dsa.errors import DSAWarning, notify

__all__ = ["compiled", "inlined"]

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")

_said: Final[list[str]] = []
"""What was said in this process: once is enough."""


@overload
def compiled(function: Callable[_Args, _Result], /) -> Callable[_Args, _Result]: ...


@overload
def compiled(
    **options: Any,  # noqa: ANN401 - numba's
) -> Callable[[Callable[_Args, _Result]], Callable[_Args, _Result]]: ...


def compiled(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Compile a function with numba when it is first called, keeping its type.

    It releases the interpreter's lock and divides as numpy does: with Python's checks of every division
    nothing is vectorised.

    Args:
        function: The function; None when there are options.
        **options: More of `numba.njit`'s, such as ``fastmath``.
    """
    if function is None:
        return lambda given: _with_cache(given, options)
    return _with_cache(function, options)


@overload
def inlined(function: Callable[_Args, _Result], /) -> Callable[_Args, _Result]: ...


@overload
def inlined(
    **options: Any,  # noqa: ANN401 - numba's
) -> Callable[[Callable[_Args, _Result]], Callable[_Args, _Result]]: ...


def inlined(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Compile a part of a pass over rows: it is copied into whatever calls it, and counts no references.

    numba hands each number of an array or a named tuple to a function by itself, on the stack: calling the
    few functions that update a row of 8 elements took ten times as long as what they do.

    Args:
        function: The function, which makes no arrays; None when there are options.
        **options: See `compiled`.
    """
    options |= {"_nrt": False, "forceinline": True}
    if function is None:
        return lambda given: _with_cache(given, options)
    return _with_cache(function, options)


def _with_cache(function: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    dispatcher: Any = njit(nogil=True, error_model="numpy", **options)(function)
    if hasattr(dispatcher, "enable_caching"):  # it is the function itself under NUMBA_DISABLE_JIT
        # What `enable_caching` does, with a cache of our own.
        dispatcher._cache = _cache_of(function)
    return cast("Callable[..., Any]", dispatcher)


def _cache_of(function: Callable[..., Any]) -> FunctionCache | NullCache:
    try:
        return _Cache(function)
    except Exception as error:  # RuntimeError where there is no place; a source that can't be read; ...
        return _NoCache(str(error))


@final
class _Cache(FunctionCache):
    """numba's cache of one function, for which whatever fails is a miss."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)  # type: ignore[no-untyped-call]
        locator = self._impl.locator
        self._cache_file = _Files(
            locator.get_cache_path(), self._impl.filename_base, locator.get_source_stamp()
        )  # type: ignore[no-untyped-call]

    def load_overload(self, sig: Any, target_context: Any) -> Any:  # noqa: ANN401 - numba's
        """Return the code that was compiled for a signature, or None."""
        try:
            return super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        except Exception:  # of any kind: a damaged pickle may raise whatever it likes
            return None

    def save_overload(self, sig: Any, data: Any) -> None:  # noqa: ANN401 - numba's
        """Keep the code for a signature if that is possible."""
        try:
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]
        except Exception as error:
            _say_uncached(str(error) or type(error).__name__)

    def _index_key(self, sig: Any, codegen: Any) -> tuple[Any, ...]:  # noqa: ANN401 - numba's
        """Return what code is found by: numba's key knows only the file that the function is in.

        A function that is made around others is told by their names. numba pickles them, which gives other
        bytes in each process.
        """
        function = self._py_func
        around = [each.cell_contents for each in function.__closure__ or ()]
        names = tuple(f"{each.__module__}.{each.__qualname__}" for each in around)
        code = zlib.crc32(function.__code__.co_code)
        return sig, codegen.magic_tuple(), code, names, _sources()


@final
class _Files(IndexDataCacheFile):
    """The files of a function's code: an index, and one file for each signature.

    Each has a checksum, and code says what it is of: two processes that write at the same time can leave an
    index that points at other code.
    """

    def save(self, key: Any, data: Any) -> None:  # noqa: ANN401 - numba's
        """Keep code under a key."""
        try:
            self._load_index()  # type: ignore[no-untyped-call]
        except Exception:  # it would be in the way of its own replacement
            self.flush()  # type: ignore[no-untyped-call]
        super().save(key, (key, data))  # type: ignore[no-untyped-call]

    def load(self, key: Any) -> Any:  # noqa: ANN401 - numba's
        """Return the code of a key, or None when there is none or it is of another."""
        found = super().load(key)  # type: ignore[no-untyped-call]
        if found is None:
            return None
        owner, data = found
        return data if owner == key else None

    def _dump(self, obj: Any) -> bytes:  # noqa: ANN401 - numba's
        """Return what is written of an index or of code."""
        return pickle.dumps(_Sealed(super()._dump(obj)))  # type: ignore[no-untyped-call]


@final
class _Sealed:
    """Bytes that check themselves, and become what they stand for, when they are read again."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __reduce__(self) -> tuple[Callable[[int, bytes], Any], tuple[int, bytes]]:
        return _unsealed, (zlib.crc32(self._data), self._data)


def _unsealed(checksum: int, data: bytes) -> Any:  # noqa: ANN401 - see `_Files`
    if zlib.crc32(data) != checksum:
        raise pickle.UnpicklingError
    return pickle.loads(data)


@final
class _NoCache(NullCache):
    """For a function whose code can't be kept.

    Args:
        reason: Why.
    """

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def save_overload(self, sig: Any, data: Any) -> None:  # noqa: ANN401 - numba's
        """Say that it isn't kept."""
        del sig, data
        _say_uncached(self._reason)


@lru_cache(maxsize=1)
def _sources() -> int:
    """Return a checksum of all kernels' sources: they are compiled into each other."""
    checksum = 0
    for path in sorted(Path(__file__).parent.glob("*.py")):
        checksum = zlib.crc32(path.read_bytes(), checksum)
    return checksum


def _say_uncached(reason: str) -> None:
    """Warn, the first time, that code isn't kept; not before something was compiled: help needs no kernel."""
    if not _said:
        _said.append(reason)
        notify(
            f"compiled kernels can't be kept ({reason}), so that every process compiles them anew, which "
            "takes seconds: set NUMBA_CACHE_DIR to a directory that can be written",
            DSAWarning,
        )
