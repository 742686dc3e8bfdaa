"""What is released: an sdist and a wheel, what they say of themselves, and where they run."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import yaml
from fresh import run_fresh

import pararnn
from pararnn.base.intact import SIGNS, check_intact

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "pararnn"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
USE = """
import runpy, sys
import pararnn, torch
script = sys.argv[1]
torch.manual_seed(0)
layer = pararnn.ParaGRU(4, 8)
report = pararnn.verify(layer, torch.randn(2, 20, 4))
assert report.passed, report
print(pararnn.__file__)
sys.argv = [script, "--version"]
runpy.run_path(script, run_name="__main__")
"""


def _run(*command, **options):
    result = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, **options
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """Folder of an sdist of the tracked sources and of the wheel that is built of it."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(PACKAGE, source / "src" / "pararnn", ignore=shutil.ignore_patterns("__pyc*"))
    # Without isolation: the builder is in this environment, and a test asks no registry.
    _run(sys.executable, "-m", "build", "--no-isolation", source)
    return source / "dist"


@pytest.mark.thorough
def test_twine_accepts_what_is_built(dist):
    files = sorted(dist.iterdir())
    version = pararnn.__version__
    assert [file.name for file in files] == [
        f"pararnn-{version}-py3-none-any.whl",
        f"pararnn-{version}.tar.gz",
    ]
    out = _run(sys.executable, "-m", "twine", "--no-color", "check", "--strict", *files)
    assert out.count("PASSED") == 2


@pytest.fixture(scope="module")
def clean(dist, tmp_path_factory):
    """Python of an environment with the wheel and PyTorch of this one, and how to run there.

    It has neither this repository nor its install.
    """
    tmp_path = tmp_path_factory.mktemp("clean")
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    own = sysconfig.get_path("purelib", vars={"base": str(tmp_path / "env")})
    # A path in a .pth file is searched, and the .pth files there, such as ours, do not count.
    Path(own, "torch.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (wheel,) = dist.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
    _run(*pip, "install", "--no-deps", "--no-index", "--no-compile", wheel)
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    return python, {"cwd": tmp_path, "env": environment}


@pytest.mark.thorough
def test_the_wheel_runs_in_a_clean_environment(clean):
    python, options = clean
    script = python.parent / "pararnn"
    out = _run(python, "-c", USE, script, **options)
    file, version = out.splitlines()
    assert Path(file).parent.is_relative_to(python.parent.parent)
    assert version == f"pararnn {pararnn.__version__}"
    assert script.read_text().splitlines()[0] == f"#!{python}"


@pytest.mark.thorough
def test_a_model_is_served_in_the_words_of_the_docs(clean):
    """Its program of three lines, `pararnn serve`, and curl: with a free port in place of 8000."""
    pytest.importorskip("uvicorn")
    if shutil.which("curl") is None:
        pytest.skip("there is no curl")
    python, options = clean
    page = (ROOT / "docs" / "getting-started.md").read_text(encoding="utf-8")
    _, _, text = page.partition("### From a wheel to a served model")
    commands = re.findall(r"^\$ (.*)$", text.partition("```console")[2].partition("```")[0], re.M)
    pip, write, serve, curl = commands
    assert pip.startswith("pip install 'dist/pararnn-")
    program = text.partition("```python\n")[2].partition("```")[0]
    (options["cwd"] / "model.py").write_text(program, encoding="utf-8")
    # Scripts of the environment are found first, as after activating it.
    path = f"{python.parent}{os.pathsep}{options['env']['PATH']}"
    options = {**options, "env": {**options["env"], "PATH": path}}
    _run("bash", "-c", write, **options)
    command = f"exec {serve.removesuffix(' &')} --device cpu --port 0"
    with subprocess.Popen(
        ["bash", "-c", command], stdout=subprocess.PIPE, text=True, **options
    ) as server:
        try:
            name, _, address = server.stdout.readline().strip().partition(" at ")
            assert name == "model"
            question = curl.replace("http://127.0.0.1:8000/v1", address)
            assert question != curl
            answer = json.loads(_run("bash", "-c", question, **options))
            assert answer["usage"]["completion_tokens"] == 20
            assert answer["choices"][0]["finish_reason"] == "length"
        finally:
            server.terminate()


def test_the_wheel_has_every_file_of_the_package(dist, tmp_path):
    (wheel,) = dist.glob("*.whl")
    shutil.unpack_archive(wheel, tmp_path, "zip")
    built = {path.relative_to(tmp_path) for path in tmp_path.glob("pararnn/**/*.*")}
    own = {path.relative_to(ROOT / "src") for path in PACKAGE.glob("**/*.*")}
    assert built == {path for path in own if "__pycache__" not in path.parts}
    assert len(built) > 200


def test_files_that_say_the_version_agree():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == pararnn.__version__
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    first, *others = re.findall(r"^## (.*)$", changelog, re.MULTILINE)
    assert first == "[Unreleased]"
    for heading in others[:1]:
        assert heading == f"[{pararnn.__version__}] - {citation['date-released']}"
    security = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    assert f"| {pararnn.__version__.rpartition('.')[0]} | yes |" in security


NAMES_AN_INDEX = re.compile(
    r"pip3?\s+install(?:[ \t]+\S+)*?\s+['\"]?pararnn(?![\w-]|'s)|\bpararnn\["
)
"""What asks a package index for pararnn, until it is in one: whoever took the name answers."""


def test_what_says_how_to_install_names_no_index():
    for text in ("pip install pararnn", "pip install -U 'pararnn[hf]'", "or 'pararnn[cu12]'"):
        assert NAMES_AN_INDEX.search(text)
    for text in (
        "pip install 'dist/pararnn-0.2.0-py3-none-any.whl[hf]'",
        "pip install . of pararnn's",
    ):
        assert not NAMES_AN_INDEX.search(text)
    folders = ("docs", "src", "examples", "benchmarks", ".github")
    kinds = (".md", ".py", ".rst", ".yml", ".ipynb", ".h")
    below = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    files = [*ROOT.glob("*.md"), *(path for path in below if path.suffix in kinds)]
    assert len(files) > 300
    extras = set(PYPROJECT["project"]["optional-dependencies"])
    for path in files:
        text = re.sub(r'"\s*\n\s*f?"', "", path.read_text(encoding="utf-8"))  # of adjacent literals
        match = NAMES_AN_INDEX.search(text)
        assert match is None, f"{path}: {match[0]}"
        for names in re.findall(r"(?:'\.|\.whl)\[([\w,]+)\]", text):
            assert set(names.split(",")) <= extras, path
        for version in re.findall(r"pararnn-([\d.]+)-py3", text):
            assert version == pararnn.__version__, path


def _numbers(text):
    return tuple(map(int, text.split(".")[:2]))


def test_supported_versions_are_those_of_the_package_and_of_ci():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = dict(
        re.findall(r"^\| (Python|PyTorch) \| ([\d.]+ \| [\d.]+) \|$", readme, re.MULTILINE)
    )
    project = PYPROJECT["project"]
    requirements = {
        "Python": project["requires-python"].removeprefix(">="),
        "PyTorch": project["dependencies"][0].removeprefix("torch>="),
    }
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    jobs = workflow["jobs"]["check"]["strategy"]["matrix"]["include"]
    releases = [job for job in jobs if not job.get("nightly")]
    corners = {
        "Python": sorted(_numbers(job["python"]) for job in releases),
        "PyTorch": sorted(_numbers(job["torch"].removeprefix("torch==")) for job in releases),
    }
    for name, versions in corners.items():
        oldest, newest = table[name].split(" | ")
        assert _numbers(oldest) == _numbers(requirements[name]) == versions[0]
        assert _numbers(newest) == versions[-1]


def test_workflows_pin_actions_and_publish_by_identity_alone():
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        for action in re.findall(r"uses: (.*)", path.read_text(encoding="utf-8")):
            assert re.fullmatch(r"\./.*|\S+@[0-9a-f]{40} # v[\d.]+", action), action
    release = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8"))
    assert release["permissions"] == {"contents": "read"}
    publish = release["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["needs"] == ["check", "build"]
    assert "secrets" not in (ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8")


def test_read_the_docs_installs_what_the_docs_need():
    config = yaml.safe_load((ROOT / ".readthedocs.yaml").read_text(encoding="utf-8"))
    (install,) = config["python"]["install"]
    assert set(install["extra_requirements"]) <= set(PYPROJECT["project"]["optional-dependencies"])
    assert (ROOT / config["sphinx"]["configuration"]).exists()


def test_templates_are_forms():
    forms = list((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
    assert forms
    for path in forms:
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert form["name"]
        assert form["description"]
        assert all(part["attributes"]["label"] for part in form["body"])


def test_this_package_is_intact():
    check_intact(PACKAGE)


@pytest.mark.parametrize("sign", SIGNS)
def test_files_of_the_other_distribution_raise(sign, tmp_path):
    folder = tmp_path / "pararnn"
    file = Path(os.path.normpath(folder / sign.replace("*", "x")))
    folder.mkdir()
    check_intact(folder)
    file.parent.mkdir(exist_ok=True)
    file.touch()
    with pytest.raises(ImportError, match=rf"{re.escape(str(file))} is not pararnn's.*pip uninst"):
        check_intact(folder)


@pytest.mark.parametrize(
    ("module", "first"),
    [("pararnn", "ours"), ("pararnn.lab.cli", "ours"), ("pararnn.lab.cli", "theirs")],
)
def test_a_mixed_package_cannot_be_imported(module, first, tmp_path):
    """Whichever of the two was installed last, and wrote `__init__.py`."""
    shutil.copytree(PACKAGE, tmp_path / "pararnn", ignore=shutil.ignore_patterns("__pyc*"))
    (tmp_path / "pararnn" / "paged.py").touch()
    if first == "theirs":
        (tmp_path / "pararnn" / "__init__.py").write_text("")
    result = run_fresh(f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import {module}")
    assert result.returncode
    assert "pip uninstall pararnn pararnn-torch" in " ".join(result.stderr.split())
