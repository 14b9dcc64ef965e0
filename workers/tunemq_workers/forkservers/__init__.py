"""Forkservers: processes with a user's libraries loaded, which fork the processes of trials."""
