"""Objects of an earlier run get the classes that the script has now."""

from __future__ import annotations

import pickle
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import cloudpickle
import pytest

from tunemq_shared.base import script_classes
from tunemq_shared.base.errors import TrainableError
from tunemq_shared.base.pickling import dump, dump_out_of_band
from tunemq_shared.base.script_classes import SCRIPT_MODULE, receive_script_classes
from tunemq_shared.base.unpickling import load_pickled
from tunemq_shared.checkpoints.checkpoint import Checkpoint
from tunemq_shared.code.code_by_value import load_trainable, pickle_trainable
from tunemq_shared.code.config_packing import pack_config, repack_config, unpack_config

NAME = "script_of_this_test"
SOURCE = """
import dataclasses, enum, typing

class Opt(enum.Enum):
    ADAM = enum.auto()
    SGD = enum.auto()

class Level(enum.IntEnum):
    LOW = 1

class Text(enum.StrEnum):
    ON = "on"

class Part(enum.Flag):
    BIAS = enum.auto()
    NORM = enum.auto()

class Size(typing.NamedTuple):
    width: int
    height: int = 0

@dataclasses.dataclass
class Layer:
    width: int
    opt: Opt

@dataclasses.dataclass(frozen=True)
class Frozen:
    width: int
    opt: Opt

@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    width: int
    opt: Opt

T = typing.TypeVar("T")

class Box(typing.Generic[T]):
    def __init__(self, value):
        self.value = value

class Net:
    class Block:
        class Kind(enum.Enum):
            DEEP = "deep"

    def __eq__(self, other):
        return isinstance(other, Net) and vars(self) == vars(other)

    __hash__ = None

    def run(self):
        return "earlier"

class Table(dict):
    pass

class Failed(ValueError):
    pass
"""

Script = Callable[..., Any]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Script]:
    """Run the source as a new process runs its script, and return the script's module."""
    library = cloudpickle.cloudpickle
    monkeypatch.setattr(script_classes, "_received", None)
    names = []

    def run(source: str = SOURCE, name: str = NAME, file: str = "") -> Any:
        # Another process knows no class of this one.
        monkeypatch.setattr(library, "_DYNAMIC_CLASS_TRACKER_BY_ID", WeakValueDictionary())
        monkeypatch.setattr(library, "_DYNAMIC_CLASS_TRACKER_BY_CLASS", WeakKeyDictionary())
        module = types.ModuleType(name)
        if file:
            module.__file__ = file
        monkeypatch.setitem(sys.modules, name, module)
        exec(textwrap.dedent(source), vars(module))
        if name not in cloudpickle.list_registry_pickle_by_value():
            cloudpickle.register_pickle_by_value(module)
            names.append(module)
        return module

    yield run
    for module in names:
        cloudpickle.unregister_pickle_by_value(module)


def loaded(pickled: bytes) -> Any:
    return load_pickled(pickled, "the object")


VALUES = [
    "Opt.ADAM",
    "Opt",
    "Level.LOW",
    "Level.from_bytes",
    "Text.ON",
    "Part.BIAS",
    "Part.BIAS | Part.NORM",
    "Part(0)",
    "Size(1, 2)",
    "Layer(1, Opt.SGD)",
    "Frozen(1, Opt.SGD)",
    "Slotted(1, Opt.SGD)",
    "Net()",
    "Net.Block.Kind.DEEP",
    "[Opt.ADAM, (Opt.SGD, Frozen(1, Opt.SGD))]",
    "{'a': {'b': [Layer(2, Opt.ADAM)]}}",
    "{Opt.ADAM: Level.LOW, Frozen(1, Opt.SGD): Size(1)}",
    "{Opt.ADAM, Frozen(1, Opt.SGD)}",
    "Table(a=Opt.ADAM)",
    "__import__('collections').OrderedDict(z=Opt.ADAM, a=Level.LOW)",
]


@pytest.mark.parametrize("value", VALUES)
def test_object_of_an_earlier_run_equals_one_of_the_present_classes(
    script: Script, value: str
) -> None:
    pickled = dump(eval(value, vars(script())))
    now = script()
    expected = eval(value, vars(now))

    found = loaded(pickled)

    assert found == expected
    assert type(found) is type(expected)
    assert repr(found) == repr(expected) or value == "Net()"


def test_members_flags_and_classes_are_identical_to_the_present_ones(script: Script) -> None:
    values = ("Opt.SGD", "Part.BIAS | Part.NORM", "Opt", "Net.Block", "Level.LOW", "Text.ON")
    before = script()
    pickled = dump([eval(one, vars(before)) for one in values])
    now = script()

    for one, found in zip(values, loaded(pickled), strict=True):
        assert found is eval(one, vars(now))


def test_generic_class_and_exception_are_the_present_ones(script: Script) -> None:
    before = script()
    pickled = dump((before.Box(before.Opt.ADAM), before.Box[int], before.Failed("why")))
    now = script()

    box, alias, error = loaded(pickled)

    assert isinstance(box, now.Box)
    assert box.value is now.Opt.ADAM
    assert alias == now.Box[int]
    assert isinstance(error, now.Failed)
    assert error.args == ("why",)


def test_objects_have_the_present_methods_and_the_class_stays_as_it_is(script: Script) -> None:
    pickled = dump(script().Net())
    now = script(SOURCE.replace('"earlier"', '"now"'))
    before = dict(vars(now.Net))

    assert loaded(pickled).run() == "now"

    assert dict(vars(now.Net)) == before


def test_member_is_found_by_its_name_though_its_value_has_changed(script: Script) -> None:
    before = script()
    pickled = dump([before.Opt.SGD, before.Part.BIAS | before.Part.NORM])
    added = "    NEW = enum.auto()\n"
    now = script(
        SOURCE.replace("    ADAM", f"{added}    ADAM").replace("    BIAS", f"{added}    BIAS")
    )

    assert loaded(pickled) == [now.Opt.SGD, now.Part.BIAS | now.Part.NORM]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("    ADAM = enum.auto()\n", "", r"\(Opt\) .*the Enum Opt has no member ADAM;"),
        ("width: int\n    height: int = 0", "height: int\n    width: int", "width, height in an"),
        ("width: int\n    height: int = 0", "side: int", "Size had the fields width, height"),
        ("(typing.NamedTuple)", "", "Size had the fields width, height .* and has none now"),
        (
            "Slotted:\n    width: int\n    opt: Opt",
            "Slotted:\n    opt: Opt\n    width: int",
            "Slotted had the fields width, opt in an earlier run, and has opt, width now",
        ),
        (
            "Slotted:\n    width: int\n    opt: Opt",
            "Slotted:\n    width: int\n    opt: Opt\n    bias: bool = True",
            "has width, opt, bias now; keep the fields as they were",
        ),
        (
            "(frozen=True)\nclass Frozen",
            "(frozen=True, slots=True)\nclass Frozen",
            "Frozen had the fields of a dict in an earlier run, and has width, opt now",
        ),
    ],
    ids=["member", "swapped", "renamed", "plain", "slots", "more slots", "slots now"],
)
def test_class_that_cannot_take_its_objects_is_named(
    script: Script, old: str, new: str, said: str
) -> None:
    before = script()
    classes = (before.Slotted, before.Frozen)
    pickled = dump(
        [before.Opt.ADAM, before.Size(1, 2), *(one(1, before.Opt.SGD) for one in classes)]
    )
    assert old in SOURCE
    script(SOURCE.replace(old, new))

    with pytest.raises(TrainableError, match=said):
        loaded(pickled)


def test_fields_that_pickles_name_may_change_and_others_may_be_added(script: Script) -> None:
    before = script()
    pickled = dump([before.Size(1, 2), before.Layer(1, before.Opt.SGD)])
    now = script(
        SOURCE.replace("height: int = 0", "height: int = 0\n    depth: int = 3").replace(
            "class Layer:\n    width: int\n    opt: Opt",
            "class Layer:\n    opt: Opt\n    width: int\n    bias: bool = True",
        )
    )

    assert loaded(pickled) == [now.Size(1, 2, 3), now.Layer(now.Opt.SGD, 1, bias=True)]


@pytest.mark.parametrize("now", ["", "def Net(): pass", "Net = 3"])
def test_objects_keep_their_class_if_the_script_has_none_of_its_name(
    script: Script, now: str
) -> None:
    pickled = dump(script().Net())

    script(now)

    assert loaded(pickled).run() == "earlier"


def test_pickle_without_names_keeps_its_classes(script: Script) -> None:
    """As earlier versions and cloudpickle itself write it."""
    pickled = cloudpickle.dumps([script().Net(), script().Opt.ADAM])
    now = script(SOURCE.replace('"earlier"', '"now"'))

    net, opt = loaded(pickled)

    assert net.run() == "earlier"
    assert opt.name == "ADAM"
    assert not isinstance(net, now.Net)


def test_subclass_that_is_gone_inherits_from_the_present_base(script: Script) -> None:
    subclass = "\nclass Wide(Net):\n    def run(self):\n        return 'wide ' + super().run()\n"
    pickled = dump(script(SOURCE + subclass).Wide())
    now = script(SOURCE.replace('"earlier"', '"now"'))

    found = loaded(pickled)

    assert isinstance(found, now.Net)
    assert found.run() == "wide now"


def test_classes_without_a_name_in_the_script_are_not_replaced(script: Script) -> None:
    source = """
        import collections, enum
        def make(name):
            class Local(enum.Enum):
                ONE = name
            return Local
        def row():
            return collections.namedtuple("Row", "a b")
        class Opt(enum.Enum):
            ONE = "first"
        First = Opt
        class Opt(enum.Enum):
            ONE = "second"
        class Row:
            pass
    """
    before = script(source)
    row = before.row()
    given = [before.make("x").ONE, before.make("y").ONE, before.First.ONE, before.Opt.ONE]

    pickled, pickled_row = dump(given), dump(row(1, 2))
    assert loaded(pickled) == given

    now = script(source)
    x, y, first, second = loaded(pickled)

    assert [x.value, y.value, first.value, second.value] == ["x", "y", "first", "second"]
    assert second is now.Opt.ONE
    # `Row` is another class in the script.
    assert loaded(pickled_row)._asdict() == {"a": 1, "b": 2}


def test_own_reduction_of_a_member_is_respected(script: Script) -> None:
    source = """
        import enum
        class Opt(enum.Enum):
            OLD = 1
            NEW = 2
            def __reduce_ex__(self, protocol):
                return Opt, (2,)
    """
    pickled = dump(script(source).Opt.OLD)
    now = script(source)

    assert loaded(pickled) is now.Opt.NEW


def test_pickles_can_be_read_without_tunemq(script: Script) -> None:
    now = script()
    given = [now.Opt.ADAM, now.Part.BIAS | now.Part.NORM, now.Frozen(1, now.Opt.SGD)]

    assert pickle.loads(dump(given)) == given


def test_objects_bound_by_parameters_have_the_present_classes(script: Script) -> None:
    before = script()
    pieces, buffers = dump_out_of_band({"opt": before.Opt.ADAM})
    now = script()

    assert load_pickled(b"".join(pieces), "it", buffers)["opt"] is now.Opt.ADAM


def test_configuration_is_packed_again_with_the_present_classes(script: Script) -> None:
    before = script()
    packed = pack_config({"lr": 0.1, "opt": before.Opt.ADAM, "net": [before.Net()]})
    now = script(SOURCE.replace('"earlier"', '"now"'))

    again = repack_config(packed)

    script("")  # as in a process that does not have the script
    script_classes.receive_script_classes()
    config = unpack_config(again)
    assert config["lr"] == 0.1
    assert config["net"][0].run() == "now"
    assert config["opt"].name == now.Opt.ADAM.name


def test_configuration_that_can_be_packed_only_once_stays_as_it_is(script: Script) -> None:
    source = """
        class Once:
            def __init__(self, left):
                self.left = left
            def __reduce__(self):
                if not self.left:
                    raise TypeError("only once")
                return Once, (self.left - 1,)
    """
    packed = pack_config({"once": script(source).Once(1)})

    assert repack_config(packed) == packed


def train_of(module: Any) -> Any:
    exec("def train(config):\n    return Opt.ADAM, Layer", vars(module))
    return module.train


def test_trial_process_gives_configurations_and_checkpoints_the_classes_of_its_code(
    script: Script,
) -> None:
    earlier = script()
    saved = Checkpoint.from_dict({"opt": earlier.Opt.ADAM, "level": earlier.Level.LOW})
    present = script()
    code = pickle_trainable(train_of(present))
    config = pack_config({"opt": present.Opt.ADAM, "level": present.Level.LOW})
    script("class Opt: pass")  # this process's own, not the script's

    receive_script_classes()
    adam, layer = load_trainable(code)({})
    state = saved.to_dict()
    found = unpack_config(config)

    assert found["opt"] is adam
    assert state["opt"] is adam
    # Saved again, as another trial process of this run reads it.
    later = Checkpoint.from_dict({"layer": layer(1, adam)}).to_dict()
    assert isinstance(later["layer"], layer)
    # The code does not refer to this class, so the newest configuration decides.
    assert saved.to_dict()["level"] is found["level"]


def test_configuration_of_a_later_trial_does_not_get_classes_of_an_older_checkpoint(
    script: Script,
) -> None:
    saved = Checkpoint.from_dict({"net": script().Net()})
    present = script(SOURCE.replace('"earlier"', '"now"'))
    code, config = pickle_trainable(train_of(present)), pack_config({"net": present.Net()})
    receive_script_classes()
    load_trainable(code)

    assert saved.to_dict()["net"].run() == "earlier"
    assert unpack_config(config)["net"].run() == "now"
    assert saved.to_dict()["net"].run() == "now"


def test_process_that_loads_new_code_forgets_the_classes_of_the_old(script: Script) -> None:
    saved = Checkpoint.from_dict({"opt": script().Opt.ADAM})
    old_code = pickle_trainable(train_of(script()))
    new_code = pickle_trainable(train_of(script()))

    for code in (old_code, new_code):
        receive_script_classes()
        trainable = load_trainable(code)

        assert saved.to_dict()["opt"] is trainable({})[0]


def test_script_that_another_one_imports_now_is_found_by_its_file(script: Script) -> None:
    before = script(name="__main__script", file="/somewhere/train.py")
    pickled = dump([before.Opt.ADAM, before.Net.Block.Kind.DEEP])
    sys.modules.pop("__main__script")
    script("class Opt: pass", name="unrelated", file="/elsewhere/train.py")
    now = script(name="train_of_this_test", file="/somewhere/train.py")

    assert loaded(pickled) == [now.Opt.ADAM, now.Net.Block.Kind.DEEP]


def test_script_on_a_farm_gets_objects_of_main_and_the_other_way_round(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A farm loads a script under another name, to skip its main part."""
    main = script(name="__main__")
    of_main = dump(main.Opt.ADAM)
    on_farm = script(name=SCRIPT_MODULE)
    of_farm = dump(on_farm.Opt.ADAM)

    assert loaded(of_main) is on_farm.Opt.ADAM
    monkeypatch.delitem(sys.modules, SCRIPT_MODULE)
    assert loaded(of_farm) is main.Opt.ADAM
