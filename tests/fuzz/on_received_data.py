"""Decoders of data from Redis, and from processes that run users' code."""

from __future__ import annotations

import io
import platform
import socket
from typing import Any

import cloudpickle
import msgspec

from tests.fuzz.decoder import Decoder, of_type, samples_of
from tests.fuzz.samples import Samples
from tunemq_scheduler.api import farm_answer_types as a
from tunemq_scheduler.api import farm_client as client
from tunemq_scheduler.farm.common import scheduler_lease
from tunemq_scheduler.farm.ipc import fork_messages
from tunemq_scheduler.farm.ipc import ipc_messages as relay
from tunemq_scheduler.farm.ipc import nonblocking_frames as relay_frames
from tunemq_scheduler.farm.service import experiment_files
from tunemq_scheduler.farm.service.request_entry import KINDS, InvalidRequest, decode_entry
from tunemq_scheduler.transport.nodes.registration_checks import read_registration
from tunemq_shared.base.decoding_errors import UNDECODABLE
from tunemq_shared.base.errors import MetricError, RequestRejected, TransportError
from tunemq_shared.executables.report_socket import ReportCall
from tunemq_shared.health import node_metrics
from tunemq_shared.protocol import messages, output_chunks, registration
from tunemq_shared.protocol.farm_requests import REQUESTS_VERSION
from tunemq_shared.signing.live_keys import LiveKeys
from tunemq_shared.signing.message_signing import MessageSigner
from tunemq_workers.broker import event_validation, redis_client
from tunemq_workers.checkpoints import checkpoint_messages
from tunemq_workers.logs import scanner_messages
from tunemq_workers.processes import forkserver_messages
from tunemq_workers.runtime import frames
from tunemq_workers.runtime import transfer_messages as transfers
from tunemq_workers.trial_process import node_channel
from tunemq_workers.trials import assignment_filter

_OWN = "0123456789abcdef"
_ANSWERS = [
    *(
        a.ExperimentSubmitted,
        a.ExperimentList,
        a.ExperimentDetail,
        a.LogPage,
        a.RequestDone,
        a.Explanation,
        a.NodeList,
    ),
    a.FarmDescription,
]


def of_redis() -> list[Decoder]:
    """Decoders of the data in a farm's Redis."""
    node_registration = msgspec.msgpack.encode(_registration())
    return [
        Decoder(
            "node_registration",
            read_registration,
            (TransportError,),
            (node_registration, *samples_of(registration.NodeRegistration)),
            ("tunemq_shared.protocol.registration:decode_registration",
             "tunemq_scheduler.transport.nodes.registration_checks:_why_unreadable"),
        ),
        of_type(
            "tunemq_shared.protocol.registration:decode_header",
            registration.decode_header,
            registration.BatchHeader,
        ),
        Decoder(
            "shared.vitals:decode_vitals",
            node_metrics.decode_node_metrics,
            UNDECODABLE,
            (
                *samples_of(node_metrics.NodeMetrics),
                msgspec.msgpack.encode(node_metrics.NodeMetrics(load=1.0)),
            ),
            ("tunemq_shared.health.node_metrics:decode_node_metrics",),
        ),
        of_type(
            "tunemq_shared.protocol.output_chunks:decode",
            output_chunks.decode,
            output_chunks.OutputChunk,
        ),
        of_type(
            "tunemq_shared.protocol.messages:decode_node_event",
            messages.decode_node_event,
            messages.NodeEvent,
        ),
        of_type(
            "tunemq_shared.protocol.messages:decode_node_events",
            messages.decode_node_events,
            list[messages.NodeEvent],
        ),
        of_type(
            "tunemq_shared.protocol.messages:decode_assignment",
            messages.decode_assignment,
            messages.Assignment,
        ),
        Decoder(
            "request entry",
            _entry,
            (InvalidRequest,),
            _entries(),
            ("tunemq_scheduler.farm.service.request_entry:decode_entry",),
        ),
        *(
            Decoder(
                f"answer {kind.__name__}",
                lambda data, kind=kind: client._decoded(data, kind),  # type: ignore[misc]
                (RequestRejected,),
                samples_of(kind),
                ("tunemq_scheduler.api.farm_client:_decoded",),
            )
            for kind in (a.FarmReply, *_ANSWERS)
        ),
        Decoder(
            "announcement",
            lambda data: client._decoded(data, a.FarmAnnouncement, is_json=True),
            (RequestRejected,),
            samples_of(a.FarmAnnouncement, as_json=True),
            ("tunemq_scheduler.api.farm_client:_decoded",),
        ),
        Decoder(
            "term in an announcement",
            client._term_in,
            (),
            samples_of(a.FarmAnnouncement, as_json=True),
            ("tunemq_scheduler.api.farm_client:_term_in",),
        ),
        Decoder(
            "holder of the scheduler's lease",
            scheduler_lease._holder,
            (),
            tuple(b"3:a:b:" + one for one in samples_of(scheduler_lease.LeaseHolder, as_json=True)),
            ("tunemq_scheduler.farm.common.scheduler_lease:_holder",),
        ),
        Decoder(
            "reply of Redis",
            _redis_reply,
            (OSError,),
            (b"$3\r\nabc\r\n", b"*2\r\n:1\r\n$-1\r\n", b"+OK\r\n", b"-ERR no\r\n", b"*-1\r\n"),
            (),
        ),
    ]  # fmt: skip


def of_processes() -> list[Decoder]:
    """Decoders of messages between local processes; trial processes run any user's code."""
    return [
        of_type(
            "tunemq_scheduler.farm.service.experiment_files:_decode",
            experiment_files._decode,
            a.Explanation,
            as_json=True,
        ),
        of_type(
            "tunemq_workers.checkpoints.checkpoint_messages:decode_save_answer",
            checkpoint_messages.decode_save_answer,
            checkpoint_messages.SaveAnswer,
        ),
        of_type(
            "tunemq_workers.checkpoints.checkpoint_messages:decode_fetch",
            checkpoint_messages.decode_fetch,
            checkpoint_messages.FetchCheckpoint,
        ),
        of_type(
            "tunemq_workers.checkpoints.checkpoint_messages:decode_fetched",
            checkpoint_messages.decode_fetched,
            checkpoint_messages.FetchAnswer,
        ),
        *(
            of_type(
                f"tunemq_workers.broker.event_validation:{name}",
                getattr(event_validation, name),
                *kinds,
            )
            for name, *kinds in (
                ("_decode_event", messages.ResultReported, messages.TrialStarted),
                ("_decode_deep", messages.ResultReported),
                ("_decode_ending", messages.TrialFailed, messages.TrialFinished),
            )
        ),
        Decoder(
            "written checkpoint",
            event_validation._decode_written,
            UNDECODABLE,
            (messages.encode(messages.CheckpointWritten("t", 1, 1, 1, "t/1-1", "0" * 64, 10)),),
            ("tunemq_workers.broker.event_validation:_decode_written",),
        ),
        of_type(
            "tunemq_workers.processes.forkserver_messages:decode_command",
            forkserver_messages.decode_command,
            forkserver_messages.ForkserverCommand,
        ),
        of_type(
            "tunemq_workers.processes.forkserver_messages:decode_report",
            forkserver_messages.decode_report,
            forkserver_messages.ForkserverReport,
        ),
        of_type(
            "tunemq_workers.processes.forkserver_messages:decode_process_spec",
            forkserver_messages.decode_process_spec,
            forkserver_messages.TrialProcessSpec,
        ),
        of_type(
            "tunemq_workers.processes.forkserver_messages:decode_boot",
            forkserver_messages.decode_boot,
            forkserver_messages.ForkserverOptions,
            as_json=True,
        ),
        of_type(
            "tunemq_workers.trial_process.node_channel:_decode_order",
            node_channel._decode_order,
            messages.TrialOrder,
        ),
        of_type(
            "tunemq_workers.trials.assignment_filter:_decode_envelope",
            assignment_filter._decode_envelope,
            assignment_filter._AssignmentEnvelope,
        ),
        of_type(
            "tunemq_workers.trials.assignment_filter:_decode_order",
            assignment_filter._decode_order,
            messages.TrialOrder,
        ),
        of_type(
            "tunemq_workers.trials.assignment_filter:_decode_beginning",
            assignment_filter._decode_beginning,
            assignment_filter._OrderPrefix,
        ),
        of_type(
            "tunemq_workers.logs.scanner_messages:decode_order",
            scanner_messages.decode_order,
            scanner_messages.LogOrder,
        ),
        of_type(
            "tunemq_workers.logs.scanner_messages:decode_answer",
            scanner_messages.decode_answer,
            scanner_messages.LogAnswer,
        ),
        of_type(
            "tunemq_workers.runtime.transfer_messages:decode_order",
            transfers.decode_order,
            transfers.TransferOrder,
        ),
        of_type(
            "tunemq_workers.runtime.transfer_messages:decode_answer",
            transfers.decode_answer,
            transfers.TransferAnswer,
        ),
        Decoder(
            "frames of a host",
            lambda data: [
                frames.FrameDecoder().feed(data),
                _in_pieces(frames.FrameDecoder(), data),
            ],
            (TransportError,),
            (frames.frame(frames.EVENT, b"abc") * 3, frames.frame(frames.IDLE)),
            ("tunemq_workers.runtime.frames:_unpack_header",),
        ),
        Decoder(
            "frames of an experiment",
            lambda data: _in_pieces(relay_frames.IpcFrameDecoder(), data),
            (TransportError,),
            (b"\0\0\0\3abc" * 3,),
            ("tunemq_scheduler.farm.ipc.nonblocking_frames:IpcFrameDecoder.feed",),
        ),
        of_type(
            "tunemq_scheduler.farm.ipc.ipc_messages:decode_for_experiment",
            relay.decode_for_experiment,
            relay.ToExperiment,
        ),
        of_type(
            "tunemq_scheduler.farm.ipc.ipc_messages:decode_for_supervisor",
            relay.decode_for_supervisor,
            relay.ToSupervisor,
        ),
        of_type(
            "tunemq_scheduler.farm.ipc.fork_messages:decode",
            fork_messages.decode,
            fork_messages.ForkAnswer,
            refuses=(*UNDECODABLE, OverflowError),
        ),
        Decoder(
            "tunemq report",
            _report,
            (MetricError,),
            (b'{"metrics": {"loss": 1}, "checkpoint": ""}\n',),
            ("tunemq_shared.executables.report_socket:ReportCall.read",),
        ),
    ]


# --- Redis ----------------------------------------------------------------------------------------


def _registration() -> registration.NodeRegistration:
    fields: dict[str, Any] = {
        "protocol": messages.PROTOCOL_VERSION,
        "instance_id": _OWN,
        "node": "one",
        "python": platform.python_version(),
        "cloudpickle": cloudpickle.__version__,
        "resources": {"cpu": 2.0},
        "gpus": (messages.Gpu("GPU-a0", "H200", 1e11),),
        "began": 1e9,
    }
    return msgspec.structs.replace(Samples(1).of(registration.NodeRegistration), **fields)


def _entry(data: bytes) -> object:
    """Decode a request entry with these fields; input that is no table is the body of each kind."""
    try:
        found = msgspec.msgpack.decode(data, type=dict[bytes, bytes])
    except UNDECODABLE:
        found = None
    if found is not None:
        return decode_entry(found, LiveKeys.none(), "0.1", 1e9)
    read, rejected = 0, None
    for kind in KINDS:
        try:
            decode_entry(_fields(kind, data), LiveKeys.none(), "0.1", 1e9)
            read += 1
        except InvalidRequest as error:
            rejected = error
    if not read and rejected is not None:
        raise rejected
    return read


def _fields(kind: str, body: bytes) -> dict[bytes, bytes]:
    return {
        b"v": str(REQUESTS_VERSION).encode(),
        b"tunemq": b"0.1",
        b"id": b"0" * 32,
        b"owner": b"ada",
        b"kind": kind.encode(),
        b"sent": b"1000000000000",
        b"body": MessageSigner("").close(body),
    }


def _entries() -> tuple[bytes, ...]:
    bodies = [(kind, body) for kind, type_ in KINDS.items() for body in samples_of(type_, number=3)]
    whole = [msgspec.msgpack.encode(_fields(kind, body)) for kind, body in bodies]
    return (*whole, *(body for _, body in bodies))


def _redis_reply(data: bytes) -> object:
    connection = object.__new__(redis_client.RedisClient)
    connection._replies = io.BytesIO(data)
    return connection._read()


# --- sockets --------------------------------------------------------------------------------------


def _in_pieces(decoder: Any, data: bytes) -> list[Any]:
    """All frames, if the data comes in pieces."""
    found = []
    for start in range(0, min(len(data), 4096), 7):
        found += decoder.feed(data[start : start + 7])
    return found


def _report(data: bytes) -> object:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data[:100_000])
        theirs.shutdown(socket.SHUT_WR)
        return ReportCall.read(ours)
