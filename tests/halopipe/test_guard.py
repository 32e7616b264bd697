from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from halopipe.guard import ShadowedPackageError, check_not_shadowed

HOME = Path(__file__).resolve().parents[2]
NAMES = ("cuda_ops", "planner", "profiler", "runtime")


def guard_in(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the guard as `python -m halopipe` would meet it: the working directory comes first on the path."""
    environment = {**os.environ, "PYTHONPATH": str(HOME)}
    environment.pop("PYTHONSAFEPATH", None)
    command = [sys.executable, "-c", "from halopipe.guard import check_not_shadowed; check_not_shadowed()"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_a_working_directory_without_our_names_passes(tmp_path: Path) -> None:
    (tmp_path / "model.py").touch()
    result = guard_in(tmp_path)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_the_users_is_named_and_not_imported(tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}.py").write_text("print('imported')\n")
    result = guard_in(tmp_path)
    assert result.returncode != 0
    assert f"error[H203] {tmp_path / name}.py hides halopipe's package '{name}' ({HOME / name})" in result.stderr
    assert f"rename {name}.py" in result.stderr
    assert result.stdout == ""


def test_the_error_carries_the_exit_code_and_the_file(tmp_path: Path) -> None:
    (tmp_path / "runtime.py").touch()
    with pytest.raises(ShadowedPackageError, match=r"^error\[H203\]") as caught:
        check_not_shadowed([str(tmp_path)])
    assert (caught.value.exit_code, caught.value.name) == (2, "runtime")
    assert caught.value.path == str(tmp_path / "runtime.py")


def test_a_package_of_the_users_is_found_as_well(tmp_path: Path) -> None:
    (tmp_path / "planner").mkdir()
    (tmp_path / "planner" / "__init__.py").touch()
    with pytest.raises(ShadowedPackageError, match="hides halopipe's package 'planner'"):
        check_not_shadowed([str(tmp_path), str(HOME)])


@pytest.mark.parametrize("name", NAMES)
def test_a_plain_folder_of_data_hides_nothing(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    check_not_shadowed([str(HOME), str(tmp_path)])


def test_a_file_later_on_the_path_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "profiler.py").touch()
    check_not_shadowed([str(HOME), str(tmp_path)])


def test_a_module_of_the_users_that_is_already_loaded_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runtime.py").touch()
    monkeypatch.setitem(sys.modules, "runtime", ModuleType("runtime"))  # so that what was there comes back
    del sys.modules["runtime"]
    monkeypatch.syspath_prepend(tmp_path)
    __import__("runtime")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(tmp_path)])
    with pytest.raises(ShadowedPackageError, match="hides halopipe's package 'runtime'"):
        check_not_shadowed()


def test_importing_halopipe_in_a_program_raises(tmp_path: Path) -> None:
    (tmp_path / "profiler.py").write_text("print('imported')\n")
    (tmp_path / "program.py").write_text(
        "try:\n    import halopipe\nexcept ImportError as error:\n    print(error.exit_code, error.name)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(HOME)}
    command = [sys.executable, "program.py"]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "2 profiler\n", "")


def test_the_installed_command_ends_with_words_and_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "runtime.py").touch()
    (tmp_path / "halopipe").write_text("import sys\nfrom halopipe.cli.app import main\nsys.exit(main())\n")
    environment = {**os.environ, "PYTHONPATH": str(HOME)}
    command = [sys.executable, "halopipe", "schema", "plan"]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error[H203] {tmp_path / 'runtime.py'} hides halopipe's package 'runtime'")
    assert "Traceback" not in result.stderr
