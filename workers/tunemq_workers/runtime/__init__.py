"""The reactor, frames on sockets, and the interfaces between a node's parts."""
