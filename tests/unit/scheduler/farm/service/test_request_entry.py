"""A request counts only if its submitter's key signed exactly it, recently."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.keys import key_folder, of_scheduler, of_submitter
from tunemq_scheduler.api.request_signing import close_request
from tunemq_scheduler.farm.service.request_entry import InvalidRequest, decode_entry
from tunemq_shared.protocol import farm_requests as r
from tunemq_shared.signing.live_keys import KeyRole, LiveKeys
from tunemq_shared.signing.message_signing import MessageSigner

NOW = 1_800_000_000.0
ID = "0123456789abcdef" * 2


@pytest.fixture(scope="module")
def farm(tmp_path_factory):
    """The keys of a farm with two submitters."""
    return key_folder(tmp_path_factory.mktemp("keys"), "ada", "ben")


@pytest.fixture(scope="module")
def scheduler(farm) -> LiveKeys:
    return of_scheduler(farm)


@pytest.fixture(scope="module")
def ada(farm) -> MessageSigner:
    return LiveKeys(of_submitter(farm, "ada"), KeyRole.SUBMITTER).submitter("ada")


def entry(
    message_signer: MessageSigner,
    request: r.FarmRequest | None = None,
    *,
    at: float = NOW,
    owner: str = "ada",
) -> dict[bytes, bytes]:
    """Return the entry that a client sends at a given time."""
    asked = request or r.StopExperiment(name="exp")
    kind, sent = str(type(asked).__struct_config__.tag), str(int(at * 1000))
    body = close_request(
        message_signer, msgspec.msgpack.encode(asked), request=ID, kind=kind, sent=sent
    )
    return {
        b"v": b"2",
        b"tunemq": b"1.0",
        b"id": ID.encode(),
        b"owner": owner.encode(),
        b"kind": kind.encode(),
        b"sent": sent.encode(),
        b"body": body,
    }


def rejected(fields: dict[bytes, bytes], keys: LiveKeys) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as found:
        decode_entry(fields, keys, "1.0", NOW)
    return found.value


def test_signed_request_belongs_to_its_submitter(scheduler, ada):
    asked = decode_entry(entry(ada), scheduler, "1.0", NOW)
    assert (asked.owner, asked.request, asked.id) == ("ada", r.StopExperiment(name="exp"), ID)
    assert asked.message_signer.signer == ada.signer


@given(st.data())
def test_altered_field_is_rejected(scheduler, ada, data):
    fields = entry(ada)
    name = data.draw(st.sampled_from([b"v", b"id", b"owner", b"kind", b"sent", b"body"]))
    value = bytearray(fields[name])
    place = data.draw(st.integers(0, len(value) - 1))
    value[place] ^= data.draw(st.integers(1, 255))
    rejected({**fields, name: bytes(value)}, scheduler)


@given(
    st.dictionaries(
        st.sampled_from([b"v", b"id", b"owner", b"kind", b"sent", b"body", b"other"]),
        st.binary(max_size=64) | st.sampled_from([b"2", ID.encode(), b"ada", b"stop", b"\x81\0"]),
    )
)
def test_request_without_a_valid_signature_is_rejected(scheduler, fields):
    rejected(fields, scheduler)


def test_request_in_the_name_of_another_user_is_rejected(scheduler, ada):
    assert rejected(entry(ada, owner="ben"), scheduler).reason == "unknown_key"
    assert rejected(entry(ada, owner="eve"), scheduler).reason == "unknown_submitter"


def test_unsigned_request_is_rejected_with_the_fix(scheduler):
    problem = rejected(entry(MessageSigner("")), scheduler)
    assert problem.reason == "unsigned"
    assert "tunemq keys add FOLDER ada" in str(problem)
    assert problem.message_signer is not None
    assert not problem.message_signer.is_signed


def test_farm_without_keys_rejects_signed_requests(ada):
    problem = rejected(entry(ada), LiveKeys.none())
    assert problem.reason == "signed_without_keys"
    assert "--keys scheduler.toml" in str(problem)
    assert decode_entry(entry(MessageSigner("")), LiveKeys.none(), "1.0", NOW).owner == "ada"


@pytest.mark.parametrize("behind", [0, 119, -59])
def test_s03_clocks_may_differ_slightly(scheduler, ada, behind):
    assert decode_entry(entry(ada, at=NOW - behind), scheduler, "1.0", NOW).owner == "ada"


@pytest.mark.parametrize(
    ("behind", "reason", "said"),
    [
        (121, "expired", "121 s behind, and 120 s is the limit"),
        (
            3600,
            "expired",
            "sent at 2027-01-15 07:00:00 UTC .* says 2027-01-15 08:00:00 UTC.*3600 s",
        ),
        (-61, "early", "61 s ahead, and 60 s is the limit"),
        (NOW, "expired", "1970"),
        (-9e11, "early", "s after 1970 by its sender"),
    ],
)
def test_s03_old_request_is_rejected_with_its_age(scheduler, ada, behind, reason, said):
    problem = rejected(entry(ada, at=NOW - behind), scheduler)
    assert problem.reason == reason
    with pytest.raises(InvalidRequest, match=said):
        raise problem
    assert problem.message_signer is not None
    assert problem.message_signer.is_signed  # she can verify it


def test_without_keys_no_clock_is_compared():
    asked = decode_entry(entry(MessageSigner(""), at=0), LiveKeys.none(), "1.0", NOW)
    assert asked.request == r.StopExperiment(name="exp")


def test_invalid_time_is_rejected(scheduler, ada):
    body = msgspec.msgpack.encode(r.StopExperiment(name="exp"))
    for sent in ("", "now", "-1", "1" * 16, "\N{ARABIC-INDIC DIGIT ONE}"):
        signed_message = close_request(ada, body, request=ID, kind="stop", sent=sent)
        fields = {**entry(ada), b"sent": sent.encode(), b"body": signed_message}
        assert "lacks its time" in str(rejected(fields, scheduler))


def test_s15_request_that_is_too_large_is_rejected_unread(scheduler, ada):
    class Unseen(bytes):
        """Fails if its content is read."""

        def __getitem__(self, _index):
            raise AssertionError("it was looked at")

    body = Unseen(r.MAX_REQUEST_BYTES + 100)
    assert rejected({**entry(ada), b"body": body}, scheduler).reason == "oversized"
    whole = r.SubmitExperiment(
        name="x",
        code=r.PickledCode(tuner=r.BlobRef("0" * 64, 1, "")),
        settings=r.ExperimentEnvironment(python="p" * (r.MAX_REQUEST_BYTES - 300)),
    )
    assert decode_entry(entry(ada, whole), scheduler, "1.0", NOW).request == whole


def test_id_of_a_request_is_known_with_its_user(scheduler, farm, ada):
    ben = LiveKeys(of_submitter(farm, "ben"), KeyRole.SUBMITTER).submitter("ben")
    hers = decode_entry(entry(ada), scheduler, "1.0", NOW)
    his = decode_entry(entry(ben, owner="ben"), scheduler, "1.0", NOW)
    assert hers.id == his.id
    assert hers.key != his.key


def test_terminal_codes_are_not_shown(scheduler):
    problem = rejected({b"id": ID.encode(), b"v": b"\x1b[2J", b"tunemq": b"\x1b]0;x\7"}, scheduler)
    assert str(problem).isprintable()
    assert (problem.reason, problem.message_signer) == ("version", None)
