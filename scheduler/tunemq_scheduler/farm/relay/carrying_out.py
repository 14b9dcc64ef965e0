"""Carrying out an experiment's orders on the farm's wire."""

from __future__ import annotations

from tunemq_scheduler.executors.wire_client import WireClient
from tunemq_scheduler.farm.relay import messages as r


def carry_out(order: r.Order, client: WireClient) -> None:
    """Give an order to the wire; one about a node that was lost meanwhile is dropped."""
    orders = client.orders(order.incarnation)
    if orders is None:
        return
    trial, epoch = order.trial, order.epoch
    match order:
        case r.Start():
            orders.start(trial, epoch, order.run_until, order.how)
        case r.Reattach():
            until, how = order.run_until, order.how
            orders.reattach(
                trial,
                epoch,
                until,
                how,
                pause=order.pause,
                stop=order.stop,
                at_checkpoint=order.at_checkpoint,
            )
        case r.Kill():
            orders.kill(trial, epoch, order.how)
        case r.MoveHorizon():
            orders.move_horizon(trial, epoch, order.run_until)
        case r.Stop():
            orders.stop(trial, epoch)
        case r.Pause():
            orders.pause(trial, epoch, at_checkpoint=order.at_checkpoint)
        case r.Release():
            orders.release(trial, epoch)
