"""Blizzard's evaluation on a virtual clock: nodes that die and are replaced, clients, big payloads (its sections 3.2 and 3.3).

The master is the real one (roq.workqueue.master: Service, Reign, Blobs over roq.workqueue.state); only the log, the stores
and the network between them are simulated (cluster.py), and time passes by itself (virtual_loop.py). What is drawn and told:
study.py.

Source: A. Levy, D. Suskin, J. Goodwin, "Blizzard: A Distributed Queue", 2009.
"""
