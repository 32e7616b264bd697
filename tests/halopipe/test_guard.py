"""A file of the user's that has the name of a package of ours is named, and not imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from halopipe.guard import ShadowedPackageError, check_not_shadowed
from tests.halopipe.commands import HOME

NAMES = ("cuda_ops", "planner", "profiler", "runtime")


@pytest.mark.every_case
@pytest.mark.parametrize("name", NAMES)
def test_a_file_or_package_that_comes_first_is_named_and_a_plain_folder_or_what_comes_later_hides_nothing(
    tmp_path: Path, name: str
) -> None:
    here = str(tmp_path)
    ours = str(HOME)
    file = tmp_path / f"{name}.py"
    check_not_shadowed([here, ours])
    (tmp_path / name).mkdir()
    check_not_shadowed([ours, here])
    (tmp_path / name / "__init__.py").touch()
    check_not_shadowed([ours, here])
    with pytest.raises(ShadowedPackageError, match=f"hides halopipe's package '{name}'"):
        check_not_shadowed([here, ours])
    (tmp_path / name / "__init__.py").unlink()
    (tmp_path / name).rmdir()
    file.touch()
    check_not_shadowed([ours, here])
    with pytest.raises(ShadowedPackageError, match=r"^error\[H203\]") as caught:
        check_not_shadowed([here])
    assert (caught.value.exit_code, caught.value.name, caught.value.path) == (2, name, str(file))
    assert f"{file} hides halopipe's package '{name}' ({HOME / name})" in str(caught.value)
    assert f"rename {name}.py" in str(caught.value)


def test_a_module_of_the_users_that_is_already_loaded_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runtime.py").touch()
    monkeypatch.setitem(sys.modules, "runtime", ModuleType("runtime"))  # so that what was there comes back
    del sys.modules["runtime"]
    monkeypatch.syspath_prepend(tmp_path)
    __import__("runtime")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(tmp_path)])
    with pytest.raises(ShadowedPackageError, match="hides halopipe's package 'runtime'"):
        check_not_shadowed()


PROGRAM = "try:\n    import halopipe\nexcept ImportError as error:\n    print(error.exit_code, error.name)\n"
INSTALLED = "import sys\nfrom halopipe.cli.app import main\nsys.exit(main())\n"


@pytest.mark.parametrize(
    ("name", "text", "code", "out", "told"),
    [
        ("program.py", PROGRAM, 0, "2 profiler\n", ""),
        ("halopipe", INSTALLED, 2, "", "error[H203] {file} hides halopipe's package 'profiler'"),
    ],
    ids=["a program that imports halopipe", "the installed command"],
)
def test_a_process_ends_with_words_and_its_exit_code_and_imports_no_such_file(
    tmp_path: Path, name: str, text: str, code: int, out: str, told: str
) -> None:
    file = tmp_path / "profiler.py"
    file.write_text("print('imported')\n")
    (tmp_path / name).write_text(text)
    command = [sys.executable, name, "schema", "plan"]
    environment = {**os.environ, "PYTHONPATH": str(HOME)}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (code, out)
    assert result.stderr.startswith(told.format(file=file))
    assert "Traceback" not in result.stderr
