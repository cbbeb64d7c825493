// express-idempotency with its Redis adapter, as the two READMEs set it up, around an insert with pg.
const express = require("express");
const idempotency = require("express-idempotency");
const RedisAdapter = require("express-idempotency-redis-adapter").default;
const { record } = require("./payments");

const adapter = new RedisAdapter({ connectionConfig: { socket: { path: process.env.REDIS_SOCKET } } });
adapter.connect().catch((error) => {
  throw error;
});

const app = express();
app.use(express.json());
app.use(idempotency.idempotency({ dataAdapter: adapter }));

app.post("/payments", async (request, response) => {
  const service = idempotency.getSharedIdempotencyService();
  // The middleware has answered already.
  if (service.isHit(request)) return;
  try {
    response.status(201).json(await record(request.body));
  } catch (error) {
    await service.reportError(request);
    response.status(503).json({ error: "the database did not answer" });
  }
});
app.listen(Number(process.env.PORT), "127.0.0.1");
