"""The HTTP server under the node and the proxy: the server and its socket, the guard and the outlet of each connection,
what belongs to one request, errors and the list of models in OpenAI's shape, and TLS. Nothing here knows a route.
"""
