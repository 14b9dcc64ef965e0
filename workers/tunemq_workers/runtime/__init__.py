"""The reactor, frames on sockets, and the state of trial processes."""
