"""After a restore, user code gets objects of the script's present classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance import scripts

pytestmark = pytest.mark.integration

CLASSES = """\
    import collections
    import dataclasses
    import enum
    import typing


    class Opt(enum.Enum):
        ADAM = enum.auto()
        SGD = enum.auto()


    class Level(enum.IntEnum):
        LOW = 1
        HIGH = 2


    class Part(enum.Flag):
        BIAS = enum.auto()
        NORM = enum.auto()


    class Size(typing.NamedTuple):
        width: int
        height: int


    @dataclasses.dataclass(frozen=True)
    class Layer:
        size: Size
        opt: Opt


    class Net:
        class Kind(enum.Enum):
            DEEP = "deep"

        def __init__(self, layers, kind):
            self.layers, self.kind = layers, kind
            self.table = Table(a=Opt.ADAM)
            self.order = collections.OrderedDict(z=Opt.ADAM, a=LAYER)

        def run(self):
            return RUN


    class Table(dict):
        pass


    LAYER = Layer(Size(2, 3), Opt.SGD)


    def made(layers):
        return {
            "opt": Opt.SGD,
            "level": Level.HIGH,
            "part": Part.BIAS | Part.NORM,
            "layer": layers[0],
            "net": Net(layers, Net.Kind.DEEP),
            "parts": {(Opt.ADAM, LAYER): [Opt.ADAM], "set": {Opt.SGD, LAYER}},
        }


    def wrong(found):
        checks = {
            "opt": found["opt"] is Opt.SGD and isinstance(found["opt"], Opt),
            "level": found["level"] is Level.HIGH,
            "part": found["part"] is Part.BIAS | Part.NORM,
            "layer": found["layer"] == LAYER and type(found["layer"].size) is Size,
            "net": type(found["net"]) is Net and found["net"].kind is Net.Kind.DEEP,
            "method": found["net"].run() == RUN,
            "nested": isinstance(found["net"].layers[0], Layer),
            "key": found["parts"].get((Opt.ADAM, LAYER)) == [Opt.ADAM],
            "set": found["parts"]["set"] == {Opt.SGD, LAYER},
            "table": type(found["net"].table) is Table and found["net"].table["a"] is Opt.ADAM,
            "ordered": found["net"].order == collections.OrderedDict(z=Opt.ADAM, a=LAYER),
        }
        return [name for name, right in checks.items() if not right]
"""

SCRIPT = """\
    import json, os
    import tunemq as tune

    RUN = os.environ["RUN"]
    {classes}

    def train(config):
        state = tune.get_checkpoint()
        saved = ["no checkpoint"] if state is None else wrong(state.to_dict())
        tune.report(
            {{"wrong": json.dumps([wrong(config), saved]), "step": 1}},
            checkpoint=tune.Checkpoint.from_dict(made([LAYER])),
        )
        if RUN == "1":
            raise ValueError("the first run fails")
        tune.report({{"wrong": json.dumps([wrong(config), saved]), "step": 2}})


    class Seen(tune.Callback):
        def on_trial_result(self, iteration, trials, trial, result, **info):
            if wrong(trial.config):
                raise ValueError(f"a callback sees {{wrong(trial.config)}}")


    def search():
        settings = tune.TuneConfig(num_samples=1 + int(RUN), max_concurrent_trials=1, seed=1)
        if RUN == "1":
            space = {{**made([LAYER]), "n": tune.randint(0, 9), "pick": tune.choice([Opt.SGD])}}
            tuner = tune.Tuner(
                train,
                param_space=space,
                tune_config=settings,
                run_config=tune.RunConfig(
                    name="search", storage_path=".", verbose=0, callbacks=[Seen()]
                ),
            )
        else:
            tuner = tune.Tuner.restore(
                "search", train, resume_errored=True, tune_config=settings,
            )
        grid = tuner.fit()
        told = [
            [one.status, one.metrics.get("wrong"), one.metrics.get("step"), wrong(one.config),
             one.config["pick"] is Opt.SGD]
            for one in grid
        ]
        print(json.dumps(told))


    if __name__ == "__main__":
        search()
"""


def told(folder: Path, run: int, script: str = "script.py") -> list[Any]:
    """What the trials and the results say of their objects, as the script prints it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RUN", str(run))
        done = scripts.run(folder, script)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def write_script(folder: Path, classes: str = CLASSES) -> None:
    scripts.write(folder, {"script.py": SCRIPT.format(classes=classes.strip())})


@pytest.mark.parametrize("starter", ["script.py", "resume.py"])
def test_restored_trials_get_objects_of_the_scripts_present_classes(
    tmp_path: Path, starter: str
) -> None:
    write_script(tmp_path)
    scripts.write(tmp_path, {"resume.py": "import script\nscript.search()\n"})
    first = told(tmp_path, 1)
    assert [one[:2] for one in first] == [["ERROR", '[[], ["no checkpoint"]]']] * 2
    # A member more, before the others: `auto()` gives them other values.
    write_script(tmp_path, CLASSES.replace("ADAM =", "NEW = enum.auto()\n        ADAM ="))

    second = told(tmp_path, 2, starter)

    assert second == [
        *[["TERMINATED", "[[], []]", 2, [], True]] * 2,
        ["TERMINATED", '[[], ["no checkpoint"]]', 2, [], True],
    ]
