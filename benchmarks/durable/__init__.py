"""Durable work queues side by side: the workload of RDSQ's Figure 2 on RoQ and on what people would use instead.

workload.py says what is done, systems.py who takes part, run.py starts processes and measures, report.py makes tables; one
file per client in clients/. A client is plain blocking code: it returns from `put` when the system says that the message is
safe, and from `take` when the message was read and its acknowledgment was sent.
"""
