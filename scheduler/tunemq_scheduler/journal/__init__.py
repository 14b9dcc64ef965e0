"""The journal: all events in order, on disk before any command is executed.

    journal = Journal.create(folder / FILE_NAME, header)
    journal.append(turn)                        one frame, one fdatasync
    journal.snapshot(state, finished)           when it `wants_snapshot`
    journal, found = Journal.resume(folder / FILE_NAME)

It is a subfolder of the experiment's folder: see `tunemq_scheduler.journal.journal_files`.
`tunemq_scheduler.journal.journal_frames` distinguishes damage from a torn end. The reasons are in
docs/decisions 0001 and 0014.
"""
