"""Measures a running server from outside, over REST, as its users see it.

answers.py   a streamed answer, with the time at which each piece came
requests.py  questions, and in which form a server takes them
server.py    any OpenAI-compatible server: its address, its models, what its requests may hold
latency.py   one question at a time, target-only and policies in turn
load.py      many clients at once, in a closed loop
figures.py   means with bootstrap intervals, percentiles, summaries
tables.py, plots.py
"""
