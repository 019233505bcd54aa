"""OpenAI's files and batches, and jobs, behind the gateway.

What is submitted it asks the gateway for, line by line, in the name of the client that has submitted it.
"""
