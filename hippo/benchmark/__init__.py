"""Measures a running server over its REST API.

answers.py   a streamed answer with the arrival time of each piece of text
requests.py  questions, and the request fields that a server takes
server.py    the address of any OpenAI-compatible server, and connections to it
latency.py   one question at a time, target-only and policies in turn
load.py      many clients at once, in a closed loop
figures.py   means with bootstrap intervals, percentiles, summaries
tables.py, plots.py
"""
