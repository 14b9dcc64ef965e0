"""`tunemq run` rejects invalid options before anything starts."""

from __future__ import annotations

import pytest

from tests.acceptance.scripts import write
from tunemq.__main__ import main
from tunemq_scheduler.cli.run_command import divided


@pytest.fixture
def project(tmp_path, monkeypatch):
    files = {"space.yaml": "lr: {loguniform: [1e-4, 1e-1]}", "train.sh": "#!/bin/sh\necho loss=1"}
    folder = write(tmp_path / "project", files)
    (folder / "train.sh").chmod(0o755)
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        ("run", 64, "the program to run is missing"),
        ("run --metric loss", 64, "the program to run is missing"),
        ("run --nonsense 1 --metric loss", 64, "--nonsense is not an option"),
        ("run --other -- ./train.sh", 64, "--other is not an option of tunemq run"),
        ("run ./train.sh --name {name}", 64, "put -- before the program"),
        ("run ./train.sh --seed {seed}", 2, "put -- before the program"),
        ("run ./train.sh --seed 1 --seed 2", 2, "given twice"),
        ("run ./train.sh --num-samples many", 2, "not a whole number"),
        ("run ./train.sh --metric score", 64, "--mode min or --mode max"),
        ("run ./train.sh --metric loss --mode up", 64, "mode='up'"),
        ("run ./train.sh --lr {lrr} --space space.yaml --metric loss", 64, "Did you mean {lr}?"),
        ("run ./train.sh --lr {lr} --metric loss", 64, "There are no parameters"),
        ("run ./train.sh --space nothere.yaml", 64, "nothere.yaml' cannot be read"),
        ("run ./nothere.sh", 64, "there is none at"),
        ("run train.sh", 64, "write ./train.sh"),
        ("run ./space.yaml", 64, "chmod +x ./space.yaml"),
        ("run ./train.sh --scheduler best", 64, "the trial scheduler 'best' is unknown"),
        ("run ./train.sh --scheduler asha,max=3", 64, "no argument 'max'; did you mean max_t?"),
        ("run ./train.sh --search asha", 64, "the search algorithm 'asha' is unknown"),
        ("run ./train.sh --resources gpu", 64, "not NAME=VALUE"),
        ("run ./train.sh --cpus many", 2, "not a number"),
        ("run ./train.sh --pattern x --metric loss", 64, "no named group"),
        ("report loss=1", 64, "no trial runs here"),
    ],
)
def test_run_command_with_invalid_options_fails_before_anything_starts(
    project, arguments, code, told, capsys
):
    try:
        given = main(arguments.split())
    except SystemExit as end:
        given = end.code

    assert given == code
    assert told in capsys.readouterr().err
    assert not (project.parent / "tunemq_results").exists()


def test_two_dashes_divide_arguments_of_the_run_command_only():
    assert divided(["run", "--a", "--", "b", "--", "c"]) == (["run", "--a"], ["b", "--", "c"])
    assert divided(["journal", "show", "--", "-x"]) == (["journal", "show", "--", "-x"], [])
