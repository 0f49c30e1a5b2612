"""The OpenAI-compatible server: one thread steps the engine, one asyncio loop talks to clients.

    loop       the engine's thread and its inbox
    stream     how events come back to one client
    culprits   which request of a step makes it raise
    protocol   what clients may send
    errors     what they are told where they may not
    answers    from events to the JSON of an answer, whole or in chunks
    documents  what the OpenAPI document says of answers
    http       bodies with a limit, streams with back-pressure, clients that leave
    app        the routes
    metrics    what /metrics tells
    protect    heads of requests that never end
    run        `minillm serve`: sockets, signals, the end
    live       the page at /: who watches, and the routes
    snapshot   what the page shows of a step, as plain numbers
    compare    three policies on the same arrivals, simulated for the page
    cluster    `minillm serve --replicas`: several engines behind one address, through Ray Serve
    replica    one of them
    routing    which of them gets a request

FastAPI, uvicorn and prometheus_client come with `pip install 'minillm[serve]'`, Ray Serve with `'minillm[cluster]'`.
"""
