// Node's http and pg: the key, the payment and the exact bytes of the answer commit in one transaction.
const { createHash } = require("node:crypto");
const http = require("node:http");
const { text } = require("node:stream/consumers");
const { Pool } = require("pg");

const pool = new Pool({ connectionString: process.env.DATABASE_URL, max: 20, connectionTimeoutMillis: 5000 });
// A connection may be lost at any time, idle or in use. Without these listeners, that would end the process.
pool.on("error", (error) => console.error(error.message));
pool.on("connect", (client) => client.on("error", (error) => console.error(error.message)));

async function pay(client, key, body) {
  const fingerprint = createHash("sha256").update(body).digest();
  // Waits while another transaction holds the key.
  const claimed = await client.query(
    "insert into idempotency_key (scope, value, fingerprint) values ($1, $2, $3) on conflict do nothing",
    [...key, fingerprint],
  );
  if (claimed.rowCount === 0) {
    const select = "select fingerprint, status, body from idempotency_key where scope = $1 and value = $2";
    const [stored] = (await client.query(select, key)).rows;
    return stored.fingerprint.equals(fingerprint) ? stored : { status: 422, body: "this key was used with another body" };
  }
  const { amount, currency } = JSON.parse(body);
  const insert = "insert into payments (amount, currency) values ($1, $2) returning id";
  const [{ id }] = (await client.query(insert, [amount, currency])).rows;
  const answer = { status: 201, body: Buffer.from(JSON.stringify({ id: Number(id), amount, currency })) };
  const complete = "update idempotency_key set status = $3, body = $4 where scope = $1 and value = $2";
  await client.query(complete, [...key, answer.status, answer.body]);
  return answer;
}

async function inTransaction(work) {
  const client = await pool.connect();
  try {
    await client.query("begin");
    const answer = await work(client);
    await client.query("commit");
    client.release();
    return answer;
  } catch (error) {
    // Closes the connection, which rolls the transaction back.
    client.release(error);
    throw error;
  }
}

const server = http.createServer(async (request, response) => {
  let answer = { status: 400, body: "X-User-ID and Idempotency-Key are required" };
  const key = [request.headers["x-user-id"], request.headers["idempotency-key"]];
  try {
    const body = await text(request);
    if (key.every(Boolean)) answer = await inTransaction((client) => pay(client, key, body));
  } catch {
    answer = { status: 503, body: "the database did not answer; retry with the same key" };
  }
  response.writeHead(answer.status, { "content-type": "application/json" }).end(answer.body);
});
server.listen(Number(process.env.PORT), "127.0.0.1");
