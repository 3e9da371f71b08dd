"""The ScalingProcess of one queue (thesis §6.4.9, EQS): assess what is over its limits, plan who moves, decide when, act."""
