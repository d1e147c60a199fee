"""The documentation runs as a reader would run it, is built without a warning, and lacks nothing public."""

import html
import importlib
import inspect
import re
import sys
import textwrap
import warnings
import zlib

import nursery
import pytest
from pages import ROOT, blocks, run
from test_public_api import PUBLIC, load, objects

import dsa
from dsa import errors
from dsa.cli.program import main
from dsa.state.migration import SET_ASIDE

DOCS = ROOT / "docs"
PAGES = {str(path.relative_to(DOCS)): path.read_text("utf-8") for path in sorted(DOCS.rglob("*.md"))}


# Its blocks want other libraries, with which tests/integrations runs every one of them.
FRAMEWORKS = "guide/frameworks.md"


@pytest.mark.parametrize(
    "name", [name for name, page in PAGES.items() if blocks(page, "python") and name != FRAMEWORKS]
)
def test_the_python_blocks_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if "import geoopt" in PAGES[name]:
        with warnings.catch_warnings(action="ignore"):  # importing it uses what torch calls deprecated
            importlib.import_module("geoopt")
    run(PAGES[name], name)


def test_the_pages_that_are_to_run_are_found():
    assert len([page for page in PAGES.values() if blocks(page, "python")]) >= 8


def test_commands_of_the_pages_exist(capsys):
    readme = (ROOT / "README.md").read_text("utf-8")
    shown = {name for page in [readme, *PAGES.values()] for name in re.findall(r"`dsa (\w+)", page)}
    with pytest.raises(SystemExit):
        main(["--help"])
    assert shown <= set(re.findall(r"^    (\w+) ", capsys.readouterr().out, re.MULTILINE))


def test_every_command_is_shown(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    commands = re.findall(r"^    (\w+) ", capsys.readouterr().out, re.MULTILINE)
    assert commands
    for command in commands:
        assert f"dsa {command}" in PAGES["guide/commands.md"]


def test_recipes_and_tests_of_the_pages_exist():
    for page in PAGES.values():
        for name in re.findall(r"`(dsa\.examples\.\w+)`", page):
            importlib.import_module(name)
        for path in re.findall(r"`((?:tests|docs|dsa|notebooks)/[\w./]+)`", page):
            assert (ROOT / path).exists(), f"{path} does not exist"


def test_the_changelog_is_of_this_release_and_tells_its_defaults():
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert f"\n## {dsa.__version__.partition('.dev')[0]} " in text
    assert f"`{SET_ASIDE}/`" in text
    different = text.partition("**Defaults that differ")[2]
    parameters = inspect.signature(dsa.DiskSparseRiemannianAdam).parameters
    for name in ("durability", "allocate", "v_transport"):
        assert f'`{name}="{parameters[name].default}"`' in different
    assert parameters["async_writes"].default is False


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built from nothing, with warnings as errors."""
    pytest.importorskip("sphinx", reason="needs the extra docs")
    pytest.importorskip("myst_parser", reason="needs the extra docs")
    out = tmp_path_factory.mktemp("site")
    options = ["-W", "--keep-going", "-q", "-d", out / "trees"]
    code = "import sys\nfrom sphinx.cmd.build import main\nsys.exit(main(sys.argv[1:]))"
    built = nursery.run(code, *options, DOCS, out / "html", cwd=ROOT)
    assert (built.returncode, built.stderr) == (0, "")
    return out / "html"


def test_the_site_has_every_page(site):
    for name in PAGES:
        assert (site / name).with_suffix(".html").is_file()


def find(name):
    """Return the object that the reference describes under a name."""
    parts = name.split(".")
    known = max(count for count in range(1, len(parts) + 1) if ".".join(parts[:count]) in sys.modules)
    # A function may have the name of the module that it is in.
    module = ".".join(parts[: min(known, len(parts) - 1)]) or parts[0]
    found = sys.modules[module]
    for part in parts[module.count(".") + 1 :]:
        found = getattr(found, part, None)
    return found


def test_the_reference_describes_what_is_public(site):
    """Every class and function that the package promises, and nothing with an underscore."""
    inventory = zlib.decompress((site / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode()
    names = [line.split()[0] for line in inventory.splitlines() if " py:" in line]
    for name in PUBLIC:
        load(name)
    described = {id(find(name)) for name in names}
    for name in PUBLIC:
        for key, value in objects(name).items():
            if inspect.isclass(value) or inspect.isfunction(value):
                assert id(value) in described, f"docs/reference describes {name}.{key} nowhere: add it"
    hidden = [name for name in names if any(part.startswith("_") for part in name.split("."))]
    assert not hidden, f"the reference shows {hidden}"


def words_of(page):
    return html.unescape(re.sub(r"<[^>]+>", "", page))


def test_the_page_of_errors_has_every_class_with_what_to_do(site):
    page = (site / "guide" / "errors.html").read_text("utf-8")
    sections = {part.split("<", 1)[0]: part for part in page.split("<h2>")[1:]}
    offered = {name: vars(errors)[name] for name in vars(errors) if name in errors.__all__}
    kinds = {name: kind for name, kind in offered.items() if inspect.isclass(kind)}
    assert list(sections) == list(kinds)
    for name, kind in kinds.items():
        assert inspect.getdoc(kind).split("\n")[0] in words_of(sections[name]), name
        if not kind.__subclasses__():
            assert "<dd>" in sections[name], f"{name} is never raised with a remedy"
    assert "pass resume=True to continue it or resume=False to start over" in sections["StateExistsError"]


def test_included_code_is_that_of_the_package(site):
    source = (ROOT / "dsa" / "examples" / "own_backend.py").read_text("utf-8")
    method = source[source.index("    def flush(") : source.index("    def close(")]
    page = (site / "guide" / "own_backend.html").read_text("utf-8")
    assert textwrap.dedent(method).strip() in words_of(page)
