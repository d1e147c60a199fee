"""What the outside may rely on: names, docstrings, annotations."""

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import dsa
import dsa.testing

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(dsa.__path__, "dsa.")
    if not module.name.endswith("__main__")
)
# The modules whose content is promised; the others may change with any release.
PUBLIC = [
    "dsa",
    "dsa.backends",
    "dsa.backends.base",
    "dsa.backends.layouts",
    "dsa.backends.memmap",
    "dsa.backends.memory",
    "dsa.backends.zarr",
    "dsa.backends.zarr_compressed",
    "dsa.inspection.comparison",
    "dsa.rules.conventions",
    "dsa.errors",
    "dsa.state.estimation",
    "dsa.rules.init",
    "dsa.rules.manifolds",
    "dsa.optimizers.sparse_riemannian_adam",
    "dsa.recis",
    "dsa.schema",
    "dsa.testing",
    "dsa.inspection.verification",
]


def load(name):
    """Return the module of a name."""
    return importlib.import_module(name)


def source(name):
    return ast.parse(Path(load(name).__file__).read_text("utf-8"))


def objects(name):
    return {key: getattr(load(name), key) for key in load(name).__all__}


def test_names_are_imported_when_they_are_used():
    """What type checkers read and what `__getattr__` does are the same."""
    (block,) = (
        node
        for node in source("dsa").body
        if isinstance(node, ast.If) and "not" not in ast.unparse(node.test)
    )
    told = {}
    for node in block.body:
        for alias in node.names:
            told[alias.asname or alias.name] = (node.module, alias.name)
    submodules = {name for name, home in told.items() if ".".join(home) in MODULES or home[0] == "dsa"}
    assert set(told) == set(dsa.__all__)
    assert {name: home for name, home in told.items() if name not in submodules} == dsa._HOMES
    assert {name: ".".join(told[name]) for name in submodules} == {
        name: dsa._MODULES.get(name, f"dsa.{name}") for name in submodules
    }
    for name in dsa.__all__:
        assert getattr(dsa, name) is not None
        assert inspect.ismodule(getattr(dsa, name)) == (name in submodules)
    assert set(dsa.__all__) <= set(dir(dsa))


def test_no_module_hides_a_function():
    """An import of a submodule binds its name in the package, whatever was there."""
    assert not {f"dsa.{name}" for name in dsa._HOMES} & set(MODULES)


def test_importing_the_package_costs_nothing():
    code = (
        "import sys, dsa, dsa.errors;"
        "print([name for name in ('torch', 'numba', 'numpy') if name in sys.modules]);"
        "print(dsa.conventions.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "dsa.rules.conventions"]
    with pytest.raises(AttributeError, match=r"no attribute 'nothing': use one of dsa\.__all__"):
        _ = dsa.nothing
    with pytest.raises(ImportError, match="nothing"):
        from dsa import nothing  # noqa: F401


def rank(key):
    """The order that the linter keeps: constants, classes, the rest."""
    return (0 if key.isupper() else 1 if key[0].isupper() else 2), key


@pytest.mark.parametrize("name", ["dsa", *MODULES])
def test_all_is_sorted_and_exists(name):
    module = load(name)
    if name in PUBLIC or hasattr(module, "__all__"):
        assert list(module.__all__) == sorted(set(module.__all__), key=rank), f"sort {name}.__all__"
        missing = [key for key in module.__all__ if not hasattr(module, key)]
        assert not missing, f"{name}.__all__ names what is not there: {missing}"


def defined(name):
    """Names that a module's own code binds: functions, classes, and what a package's face imports."""
    package = Path(load(name).__file__).name == "__init__.py"
    for node in source(name).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif package and isinstance(node, ast.ImportFrom) and str(node.module).startswith("dsa"):
            yield from (alias.asname or alias.name for alias in node.names)


@pytest.mark.parametrize("name", PUBLIC)
def test_all_is_what_is_visible(name):
    visible = {key for key in defined(name) if not key.startswith("_")}
    forgotten = visible - set(load(name).__all__)
    assert not forgotten, f"{name}: add {sorted(forgotten)} to __all__, or begin the names with an underscore"


def test_the_package_shows_nothing_else():
    """Beside its submodules, which are attributes once imported."""
    extra = {
        key for key, value in vars(dsa).items() if not key.startswith("_") and not inspect.ismodule(value)
    }
    assert extra <= set(dsa.__all__), f"hide or add to __all__: {sorted(extra - set(dsa.__all__))}"


@pytest.mark.parametrize("name", ["dsa", *MODULES])
def test_what_modules_take_from_each_other_is_offered(name):
    for node in ast.walk(source(name)):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "dsa":
            giver = load(node.module)
            for alias in node.names:
                if not inspect.ismodule(getattr(giver, alias.name, giver)) and alias.name != "__version__":
                    offered = getattr(giver, "__all__", ())
                    assert alias.name in offered, (
                        f"{name} takes {alias.name!r} from {node.module}: add it to __all__ there"
                    )


def test_the_names_that_users_write():
    from dsa import DiskSparseRiemannianAdam, conventions, errors, estimate, init
    from dsa.optimizers.sparse_riemannian_adam import DiskSparseRiemannianAdam as same

    assert DiskSparseRiemannianAdam is same
    assert {"Normal", "Uniform", "Zeros", "FromArray"} <= set(init.__all__)
    assert {"TORCH_SPARSE_ADAM", "DSA_ADAM"} <= set(conventions.__all__)
    assert {"DSAError", "StateError", "StateWarning"} <= set(errors.__all__)
    assert callable(estimate)


POSITIONAL = [
    "params", "lr", "beta1", "beta2", "eps", "weight_decay", "weight_decay_mode", "k", "disk_dir",
    "max_queue_size", "resume", "put_timeout", "retain_params", "init_max_norm_fraction",
]  # fmt: skip
KEYWORD = [
    "backend", "allocate", "durability", "async_writes", "second_moment", "v_transport", "max_step",
    "bias_correction", "convention", "state_dtype", "ids", "weight_decay_catch_up",
]  # fmt: skip


def test_the_signature_of_the_optimizer():
    """The order and the defaults of design; arguments of features that do not exist yet are left out."""
    parameters = inspect.signature(dsa.DiskSparseRiemannianAdam).parameters
    positional = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    keyword = [p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert positional == [name for name in POSITIONAL if name in parameters]
    assert keyword == [name for name in KEYWORD if name in parameters]
    defaults = {p.name: p.default for p in parameters.values() if p.default is not p.empty}
    expected = {
        "lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "weight_decay_mode": "l2",
        "k": 1.0, "disk_dir": "./disk_cache", "max_queue_size": 150, "resume": None, "put_timeout": 5.0,
        "retain_params": False, "init_max_norm_fraction": 0.5, "backend": "memmap", "allocate": "reserve",
        "durability": "process", "second_moment": "coordinate", "v_transport": "tensor", "max_step": None,
        "bias_correction": None, "convention": None,
    }  # fmt: skip
    assert {name: value for name, value in defaults.items() if name in expected} == {
        name: value for name, value in expected.items() if name in parameters
    }


def test_the_methods_of_the_optimizer():
    methods = {
        "step": ["updates", "current_k"],
        "read_rows": ["indices", "name"],
        "set_curvature": ["k", "reset_moments", "name", "map"],
        "reproject_all": ["name"],
        "flush": [],
        "close": [],
        "shutdown": [],
        "state_dict": [],
    }
    for method, names in methods.items():
        parameters = list(inspect.signature(getattr(dsa.DiskSparseRiemannianAdam, method)).parameters)
        assert parameters == ["self", *names], method
    assert isinstance(inspect.getattr_static(dsa.DiskSparseRiemannianAdam, "global_step"), property)


def members(kind):
    """Public functions and properties that a class of ours defines itself."""
    for key, value in vars(kind).items():
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if not key.startswith("_") and inspect.isfunction(function) and function.__module__.startswith("dsa"):
            yield key, function


def functions(name):
    """Every public function of a module and of its public classes, with its full name."""
    for key, value in objects(name).items():
        if inspect.isclass(value):
            if inspect.isfunction(value.__init__) and value.__init__.__module__.startswith("dsa"):
                yield f"{name}.{key}", value.__init__
            yield from ((f"{name}.{key}.{member}", function) for member, function in members(value))
        elif inspect.isfunction(value):
            yield f"{name}.{key}", value


@pytest.mark.parametrize("name", PUBLIC)
def test_everything_public_is_described(name):
    assert load(name).__doc__, f"{name} has no docstring"
    for key, value in objects(name).items():
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__doc__, f"{name}.{key} has no docstring"
    for key, function in functions(name):
        if function.__name__ != "__init__":
            doc = inspect.getdoc(function)
            assert doc, f"{key} has no docstring"
            assert doc.split("\n")[0].endswith((".", ":", "?")), (
                f"{key}: the first line is no sentence: {doc.splitlines()[0]!r}"
            )


@pytest.mark.parametrize("name", PUBLIC)
def test_everything_public_is_annotated(name):
    for key, function in functions(name):
        signature = inspect.signature(function)
        for parameter in signature.parameters.values():
            if parameter.name not in ("self", "cls"):
                assert parameter.annotation is not parameter.empty, f"{key}: annotate {parameter.name!r}"
        assert signature.return_annotation is not signature.empty, f"{key}: annotate what it returns"


@pytest.mark.parametrize("name", PUBLIC)
def test_annotations_can_be_looked_up(name):
    """Documentation tools resolve them; an import under TYPE_CHECKING would break that."""
    for key, function in functions(name):
        try:
            typing.get_type_hints(function)
        except NameError as error:
            pytest.fail(f"{key}: {error}")


@pytest.mark.parametrize(
    "name",
    [
        "dsa",
        "dsa.rules.conventions",
        "dsa.state.estimation",
        "dsa.rules.init",
        "dsa.optimizers.sparse_riemannian_adam",
        "dsa.schema",
    ],
)
def test_arguments_are_explained(name):
    """Of what users construct and call: each argument stands in the docstring of the function or class."""
    for key, value in objects(name).items():
        if inspect.isclass(value) or inspect.isfunction(value):
            names = [name for name in inspect.signature(value).parameters if name not in ("args", "kwargs")]
            names = names if inspect.isclass(value) or len(names) > 1 else []
            lacking = [name for name in names if not re.search(rf"\b{name}\b", value.__doc__)]
            assert not lacking, f"{name}.{key}: the docstring lacks {lacking}"
    for key, function in functions(name):
        names = [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]
        if function.__name__ != "__init__" and len(names) > 1 and "does" not in inspect.getdoc(function):
            lacking = [name for name in names if not re.search(rf"\b{name}\b", inspect.getdoc(function))]
            assert not lacking, f"{key}: the docstring lacks {lacking}"


def test_the_package_is_marked_as_typed():
    assert (Path(dsa.__file__).parent / "py.typed").is_file()


# Trainers that build their optimizer from the parameters alone get a subclass whose constructor does that.
SUBCLASSED = {"CombinedOptimizer"}


def test_concrete_classes_are_final():
    for name in PUBLIC:
        for key, value in objects(name).items():
            if (
                inspect.isclass(value)
                and not issubclass(value, BaseException)
                and not getattr(value, "_is_protocol", False)
            ):
                tested = name == "dsa.testing" or issubclass(value, tuple) or key in SUBCLASSED
                assert tested or getattr(value, "__final__", False), (
                    f"{name}.{key} may be subclassed: mark it @final"
                )
