"""Trials that run a command: any executable, in any language.

`executable.Executable` is the trainable; `run_executable` runs one. `output_intake` reads the
command's results: from lines of its stdout (`metric_lines`), from a file (`followed_file`), or from
``tunemq report`` (`report_command`, over `report_line`). `program` is its process and
`checkpoint_inbox` the folder for its checkpoints.
"""
