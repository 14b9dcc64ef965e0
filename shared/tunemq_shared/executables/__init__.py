"""Trials that are a command: any executable, whatever it is written in.

`executable.Executable` is the trainable; `trial` runs one. What a command says is taken in by
`result_reader`: lines of its stdout (`lines`), of a file (`following`), or ``tunemq report``
(`report_command`, over `report_line`). `program` is its process and `checkpoint_inbox` the folder
into which it puts its checkpoints.
"""
