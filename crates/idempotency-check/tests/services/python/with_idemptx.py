"""idemptx with its AsyncRedisBackend, as its README sets it up, around an insert with psycopg 3."""

import os
from contextlib import asynccontextmanager

import redis.asyncio as aioredis
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from idemptx import idempotent
from idemptx.backend import AsyncRedisBackend
from payments import NewPayment, pool, record


@asynccontextmanager
async def lifespan(_app):
    async with pool:
        yield


backend = AsyncRedisBackend(aioredis.Redis(unix_socket_path=os.environ["REDIS_SOCKET"]))

app = FastAPI(lifespan=lifespan)


@app.post("/payments")
@idempotent(storage_backend=backend, wait_timeout=3.0)
async def pay(request: Request, payment: NewPayment):
    # Its README asks for a JSONResponse, because it stores no other answer.
    return JSONResponse(await record(payment), status_code=201)
