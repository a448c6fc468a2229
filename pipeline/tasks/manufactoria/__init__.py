"""Manufactoria: write a program of pullers and painters that judges, or rewrites, a tape of colours.

`language` is the programming language, `judge` runs a program against a problem's tests, `acceptance` and `transforms`
are the problem families, `ladder` chooses a problem's tests and weaker programs, and `task` is the source of problems.
"""
