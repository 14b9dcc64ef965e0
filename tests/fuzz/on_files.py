"""Decoders of files: results, checkpoints, code, and files that users write."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from pathlib import Path

import cloudpickle
import msgspec

from tests.fuzz.decoder import Bench, Decoder, samples_of
from tunemq_scheduler.cli.run_command import _pairs
from tunemq_scheduler.output.result_file_reader import ends_with, read_rows, results_in
from tunemq_scheduler.results import result
from tunemq_scheduler.results.csv_cells import columns_of
from tunemq_scheduler.results.decision_rows import decisions_in
from tunemq_scheduler.schedulers.population.policies import read_policy
from tunemq_scheduler.search.space_file import read_space_file
from tunemq_scheduler.settings import import_checkpoint
from tunemq_shared.base import unpickling
from tunemq_shared.base.errors import (
    BlobCorrupt,
    CheckpointCorrupt,
    CheckpointError,
    ConfigError,
    MetricError,
    SearchSpaceError,
    StoreError,
    TrainableError,
    TransportError,
)
from tunemq_shared.base.pickling import dump
from tunemq_shared.checkpoints import manifest
from tunemq_shared.checkpoints.checkpoint import METADATA_FILE, Checkpoint
from tunemq_shared.checkpoints.checkpoint_bytes import bytes_to_folder
from tunemq_shared.checkpoints.checkpoint_markers import read_notes
from tunemq_shared.code import config_packing
from tunemq_shared.code.blob_folder import BlobFolder
from tunemq_shared.code.bundles import remove, unpack
from tunemq_shared.code.code_by_value import modules_of
from tunemq_shared.code.parameter_blob import (
    dump_parameters,
    modules_of_parameters,
    write_parameters,
)
from tunemq_shared.executables.followed_file import FollowedFile
from tunemq_shared.executables.metric_lines import metrics_in
from tunemq_shared.executables.report_command import _object, _Unusable, _value
from tunemq_shared.objects.s3_address import find_keys
from tunemq_shared.protocol import messages
from tunemq_shared.signing.key_files import read_key_file
from tunemq_shared.trainable import trainable_blobs
from tunemq_workers.node import node_setup

_JSON = (b'{"a": 1, "b": [1.5, null], "c": {"d": "e"}}', b'{"state": {"n": 3}}')
_HASH = "0" * 64
_DECISIONS = (
    b'{"decisions": [{"step": 9, "action": "STOP", "reason": "slow", "elapsed_s": 1.5}]}',
    b'{"decisions": [{"step": 3, "action": "EXPLOIT", "source": "t_00001", "lineage": 1}, 4]}',
)


def _decisions_in(data: bytes) -> list[str]:
    """The decisions in a line, in words."""
    row = result._read(data)
    return [str(one) for one in decisions_in([] if row is None else [row])]


def of_results(bench: Bench) -> list[Decoder]:
    """Files that trials leave in their folders, and the output of programs."""
    _s, _h = "tunemq_scheduler", "tunemq_shared"
    csv = b"training_iteration,loss\n"
    return [
        Decoder(
            "line of result.json",
            result._read,
            (),
            (*_JSON, b'{"loss": NaN}'),
            ("tunemq_scheduler.results.result:_read", "tunemq_scheduler.results.result:_decode"),
        ),
        Decoder(
            "decisions in lines of result.json",
            _decisions_in,
            (),
            _DECISIONS,
            ("tunemq_scheduler.results.decision_rows:decisions_in",),
        ),
        Decoder(
            "params.json",
            lambda data: result.Result.from_path(bench.written("trial/params.json", data).parent),
            (ConfigError,),
            _JSON,
            ("tunemq_scheduler.results.result:Result.from_path",),
        ),
        Decoder(
            "state beside a checkpoint",
            lambda data: import_checkpoint._state_in(
                str(bench.written(f"cp/{manifest.MANIFEST}", data).with_name(manifest.FILES))
            ),
            (CheckpointCorrupt,),
            _manifests(),
            (),
        ),
        Decoder(
            "rows of result.json",
            lambda data: _rows_in(bench.written("rows/result.json", data)),
            (),
            (b'{"loss": NaN, "training_iteration": 1, "trial_id": "t_00000"}\n' * 2, *_JSON),
            (
                "tunemq_scheduler.output.result_file_reader:_of_json",
                "tunemq_scheduler.output.result_file_reader:_decode_row",
                "tunemq_scheduler.output.result_file_reader:_may_be_torn",
                "tunemq_scheduler.output.result_file_reader:results_in",
            ),
        ),
        Decoder(
            "rows of progress.csv",
            lambda data: _rows_in(bench.written("rows/progress.csv", data)),
            (),
            (csv, b'training_iteration,trial_id,a\n1,t_00000,"b,c"\n2,t_00000,\n'),
            ("tunemq_scheduler.results.csv_cells:cells_of",),
        ),
        Decoder(
            "first line of progress.csv",
            columns_of,
            (StoreError,),
            (csv, b'"a,b",c\n'),
            ("tunemq_scheduler.results.csv_cells:cells_of",),
        ),
        Decoder(
            "metadata of a checkpoint",
            lambda data: Checkpoint(
                str(bench.written(f"meta/{METADATA_FILE}", data).parent)
            ).get_metadata(),
            (CheckpointError,),
            _JSON,
            ("tunemq_shared.checkpoints.checkpoint:Checkpoint.get_metadata",),
        ),
        Decoder(
            "notes of a checkpoint",
            lambda data: read_notes(str(bench.written("notes/.tune_metadata.json", data).parent)),
            (CheckpointError,),
            _JSON,
            ("tunemq_shared.checkpoints.checkpoint_markers:read_notes",),
        ),
        Decoder(
            "manifest",
            lambda data: manifest.parse_manifest("t/1", data),
            (CheckpointCorrupt,),
            _manifests(),
            ("tunemq_shared.checkpoints.manifest:parse_manifest",),
        ),
        Decoder(
            "checkpoint as an object",
            lambda data: _unpacked_object(bench, data),
            (CheckpointError,),
            (msgspec.msgpack.encode({"a": b"1", "b/c": b"2"}),),
            ("tunemq_shared.checkpoints.checkpoint_bytes:bytes_to_folder",),
        ),
        Decoder(
            "followed file",
            lambda data: _followed(bench, data),
            (MetricError,),
            (b'{"loss": 1}\n{"loss": 2}\n', b'{"loss": 1}\n{"loss": {"val": 2}}'),
            (
                "tunemq_shared.executables.followed_file:FollowedFile._read",
                "tunemq_shared.executables.followed_file:_is_object",
            ),
        ),
        Decoder(
            "printed line",
            lambda data: metrics_in(data.decode(errors="replace")),
            (),
            (b"loss=0.5 accuracy: 3e-4", b'{"loss": 1}', b"{'loss': 1}"),
            ("tunemq_shared.executables.metric_lines:metrics_in",),
        ),
        Decoder(
            "metrics of tunemq report",
            lambda data: _object(data.decode(errors="surrogateescape")),
            (_Unusable,),
            _JSON,
            ("tunemq_shared.executables.report_command:_object",),
        ),
        Decoder(
            "value of tunemq report",
            lambda data: _value(data.decode(errors="surrogateescape")),
            (),
            (b"1.5", b"text", b"[1, 2]", b"1_000"),
            ("tunemq_shared.executables.report_command:_value",),
        ),
    ]


def of_code(bench: Bench) -> list[Decoder]:
    """Code, configurations and parameters on their way, as far as nothing of them is run."""
    blobs = BlobFolder(bench.folder / "blobs")

    def blob(data: bytes) -> messages.BlobRef:
        return blobs.put(data)

    return [
        Decoder(
            "configuration",
            config_packing.peek_config,
            (TransportError,),
            (
                config_packing.pack_config({"lr": 0.1, "layers": [1, {"a": None}]}),
                config_packing.pack_config({"pair": (1, 2), "kind": int}),
            ),
            ("tunemq_shared.code.config_packing:_decode",),
        ),
        Decoder(
            "plain values",
            unpickling.load_plain,
            (unpickling.UnsafePickle,),
            (dump((1, 2.5, {"a": {3}})), dump([b"x", 10**40, 1j]), cloudpickle.dumps(int)),
            (
                "tunemq_shared.base.unpickling:load_plain",
                "tunemq_shared.base.unpickling:_PlainUnpickler",
            ),
        ),
        Decoder(
            "modules of a pickle",
            modules_of,
            (),
            (cloudpickle.dumps(lambda: json), cloudpickle.dumps({"a": (1, 2)}, protocol=2)),
            ("tunemq_shared.code.code_by_value:_modules_named",),
        ),
        Decoder(
            "shipment",
            lambda data: (
                trainable_blobs.preload_of(blob(data)),
                trainable_blobs.blobs_of(blob(data)),
            ),
            (StoreError, TrainableError),
            samples_of(trainable_blobs._CodeBlob),
            ("tunemq_shared.trainable.trainable_blobs:_decode",),
        ),
        Decoder(
            "parameters",
            lambda data: modules_of_parameters(blob(data)),
            (StoreError,),
            (Path(write_parameters(dump_parameters({"a": [1, 2]}), blobs).path).read_bytes(),),
            ("tunemq_shared.code.parameter_blob:_mapped",),
        ),
        Decoder(
            "bundle",
            lambda data: _unpacked_bundle(bench, data),
            (BlobCorrupt, OSError),
            _bundles(bench),
            (
                "tunemq_shared.code.bundles:unpack",
                "tunemq_shared.code.bundles:_checked",
                "tunemq_shared.code.bundles:_extract",
            ),
        ),
    ]


def of_users(bench: Bench) -> list[Decoder]:
    """Files and options that people write."""
    return [
        Decoder(
            "key file",
            lambda data: read_key_file(_private(bench.written("keys.toml", data))),
            (ConfigError,),
            (
                b'[orders]\n0011223344556677 = "' + b"A" * 43 + b'="\n[submitters.ada]\n'
                b'8899aabbccddeeff = "' + b"B" * 43 + b'="\n',
                b'[events]\n0011223344556677 = "x"\n',
            ),
            ("tunemq_shared.signing.key_files:_parsed", "tunemq_shared.signing.key_files:_secret"),
        ),
        Decoder(
            "credentials file",
            lambda data: find_keys(
                {"AWS_SHARED_CREDENTIALS_FILE": str(bench.written("credentials", data))}
            ),
            (StoreError,),
            (b"[default]\naws_access_key_id = a\naws_secret_access_key = b\n",),
            ("tunemq_shared.objects.s3_address:_keys_in_file",),
        ),
        Decoder(
            "policy file",
            lambda data: read_policy("Replay", bench.written("policy.txt", data), None),
            (ConfigError,),
            (b'["b", "a", 4, 4, {"lr": 1}, {"lr": 2}]\n["c", "b", 6, 8, {}, {}]\n', *_JSON),
            ("tunemq_scheduler.schedulers.population.policies:_read_file",),
        ),
        Decoder(
            "space in YAML",
            lambda data: read_space_file(str(bench.written("space.yaml", data))),
            (SearchSpaceError,),
            (b"lr: {loguniform: [1e-4, 1e-1]}\nlayers: {choice: [1, 2]}\nseed: 3\n",),
            ("tunemq_scheduler.search.space_file:_yaml",),
        ),
        Decoder(
            "space in JSON",
            lambda data: read_space_file(str(bench.written("space.json", data))),
            (SearchSpaceError,),
            (b'{"lr": {"loguniform": [1e-4, 1e-1]}, "seed": 3}',),
            ("tunemq_scheduler.search.space_file:_json",),
        ),
        Decoder(
            "NAME=VALUE",
            lambda data: _pairs("--of", data.decode(errors="surrogateescape")),
            (ConfigError,),
            (b"max_t=81,grace=[1]",),
            ("tunemq_scheduler.cli.run_command:_pairs",),
        ),
        Decoder(
            "--resources",
            lambda data: node_setup._resources(data.decode(errors="surrogateescape")),
            (ConfigError,),
            (b'{"licence": 2}',),
            ("tunemq_workers.node.node_setup:_resources",),
        ),
        Decoder(
            "--prewarm",
            lambda data: node_setup._environment(str(bench.written("prewarm", data))),
            (ConfigError,),
            samples_of(messages.Environment, as_json=True),
            ("tunemq_workers.node.node_setup:_environment",),
        ),
    ]


# --- the journal ----------------------------------------------------------------------------------


def _rows_in(path: Path) -> None:
    found = read_rows(str(path), "t_00000")
    ends_with(str(path), "t_00000", max(found.rows, default=None))
    if path.suffix == ".json":
        results = list(results_in(str(path), "t_00000", found.rows))
        assert len(results) == len(found.rows)


def _private(path: Path) -> Path:
    path.chmod(0o600)
    return path


# --- checkpoints and code -------------------------------------------------------------------------


def _manifests() -> tuple[bytes, ...]:
    info = manifest.CheckpointInfo(
        trial="t", attempt=1, n=1, step=3, metrics={"loss": float("nan")}, state={"n": [1]}
    )
    files = (manifest.FileEntry("a/b", 3, _HASH), manifest.FileEntry("c", 0, "f" * 64))
    objects = {_HASH: f"t/1-1/{_HASH}", "f" * 64: f"t/1-1/{'f' * 64}"}
    return (
        manifest.make_manifest(info, files, ("empty",)),
        manifest.make_manifest(info, files, (), objects),
    )


def _unpacked_object(bench: Bench, data: bytes) -> None:
    parent = bench.folder / "objects"
    parent.mkdir(exist_ok=True)
    try:
        bytes_to_folder(data, str(parent))
    finally:
        shutil.rmtree(parent)


def _followed(bench: Bench, data: bytes) -> object:
    path = bench.folder / "followed"
    path.unlink(missing_ok=True)
    file = FollowedFile(str(path))
    path.write_bytes(data)
    return list(file.new_objects(is_last=True))


def _bundles(bench: Bench) -> tuple[bytes, ...]:
    path = bench.folder / "bundle.zip"
    made = []
    for names in (["train.py", "models/net.py"], ["../out.py"], ["a", "a/b"], []):
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name in names:
                archive.writestr(zipfile.ZipInfo(name), "SIZE = 3\n")
        made.append(path.read_bytes())
    return tuple(made)


def _unpacked_bundle(bench: Bench, data: bytes) -> None:
    target = bench.folder / "unpacked" / "code"
    target.parent.mkdir(exist_ok=True)
    try:
        unpack(bench.written("archive.zip", data), target)
    finally:
        remove(target)
        beside = os.listdir(target.parent)
        assert not beside, beside
