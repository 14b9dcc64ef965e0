"""The list of all decoders: each new reader must be added here, or excluded with a reason."""

from __future__ import annotations

from typing import Final

from tests.fuzz.decoder import Bench, Decoder
from tests.fuzz.on_files import of_code, of_results, of_users
from tests.fuzz.on_own_files import of_scheduler
from tests.fuzz.on_received_data import of_processes, of_redis
from tests.fuzz.on_signed_messages import of_signing

#: Places of `tests.fuzz.decoder_places` that no decoder runs, each with the reason.
EXCUSED: Final = {
    # They read data that they have just written.
    "tunemq_scheduler.output.callback_states:CallbackStates.write": "its own JSON",
    "tunemq_scheduler.output.loggers.json_logger:write_params": "its own JSON",
    "tunemq.testing.check_scheduler:_Restarted.on_trial_result": "a state that it has just made",
    "tunemq.testing.comparable_state:comparable": "its own runner's state",
    "tunemq.testing.curves.curve_table:recorded_curves": "a file of the package",
    "tunemq_scheduler.search.optuna.optuna_trial_json:dump_trial": "its own JSON",
    "tunemq_shared.checkpoints.checkpoint:Checkpoint.set_metadata": "its own JSON",
    "tunemq_scheduler.transport.desired_state_executor:DesiredStateExecutor._trial_spec": "its own",
    "tunemq_shared.code.bundles:_write": "it writes",
    "tunemq_shared.checkpoints.manifest:": "it examines a type",
    "tunemq_scheduler.security.forged_signatures:_archive": "it writes",
    # Loading runs the loaded code: see tests/security/test_s01_nothing_runs_data.py.
    "tunemq_shared.base.unpickling:unpickle": "is for an experiment's own code",
    "tunemq_shared.base.unpickling:_ScriptUnpickler": "likewise",
    "tunemq_scheduler.api.pickled_tuner:load_tuner_parts": "likewise",
    # Input from a process's own child or from a library that has already parsed it.
    "tunemq_shared.executables.report_command:main": "the trial's own answer to its own command",
    "tunemq_shared.objects.s3_client:S3Client._strange": "the minio client has read it before",
    "tunemq_scheduler.farm.ipc.supervisor_side:ExperimentConnection._answer": "checked",
}


def all_decoders(bench: Bench) -> list[Decoder]:
    """All of them; files that they read lie in the folder of ``bench``."""
    return [
        *of_redis(),
        *of_processes(),
        *of_signing(bench),
        *of_scheduler(bench),
        *of_results(bench),
        *of_code(bench),
        *of_users(bench),
    ]
