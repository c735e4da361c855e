"""A stand-in for the few names of vime that the plugin and the CPU run use, for machines without vime.

It has vime's names, signatures and results, and nothing else; test_standin.py holds each of them against a real vime
checkout where VIME_ROOT names one. It trains nothing.
"""
