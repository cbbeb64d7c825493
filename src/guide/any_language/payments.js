// Node's http and pg: the key, the payment and the exact bytes of the answer commit in one transaction.
const http = require("node:http");
const { buffer } = require("node:stream/consumers");
const { DatabaseError, Pool } = require("pg");

const pool = new Pool({ connectionString: process.env.DATABASE_URL, max: 20, connectionTimeoutMillis: 5000 });
// A connection may be lost at any time, idle or in use. Without these listeners, that would end the process.
pool.on("error", (error) => console.error(error.message));
pool.on("connect", (client) => client.on("error", (error) => console.error(error.message)));
const PROBLEMS = { in_flight: 409, key_reused: 422, indeterminate: 409 };

async function pay(client, key, request, body) {
  const ensure = `select outcome, token, status, body
    from idempotency.ensure(scope => $1, operation => $2, value => $3,
      fingerprint => idempotency.fingerprint($4::bytea))`;
  const fingerprinted = Buffer.concat([Buffer.from(`${request.method} ${request.url}\n`), body]);
  const [claim] = (await client.query(ensure, [...key, fingerprinted])).rows;
  if (claim.outcome === "replayed") return claim;
  if (claim.outcome !== "claimed") return { status: PROBLEMS[claim.outcome] ?? 500, body: claim.outcome };
  const { amount, currency } = JSON.parse(body) ?? {};
  const insert = "insert into payments (amount, currency) values ($1, $2) returning id";
  const [{ id }] = (await client.query(insert, [amount, currency])).rows;
  const answer = { status: 201, body: Buffer.from(JSON.stringify({ id: Number(id), amount, currency })) };
  // pg reads a bigint as a string, so the token keeps every digit.
  const complete = `select idempotency.complete(
    scope => $1, operation => $2, value => $3, token => $4, status => $5, body => $6::bytea)`;
  await client.query(complete, [...key, claim.token, answer.status, answer.body]);
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

// 503 says that the same request may succeed later, so it is not for what fails each time.
function failure(error) {
  console.error(error.message);
  if (error instanceof SyntaxError) return { status: 400, body: "the body must be JSON" };
  // What the server says has an SQLSTATE. A connection that is lost, or that the pool does not get, has none.
  const lost = !(error instanceof DatabaseError) && !(error instanceof TypeError);
  // The server is away or full or has ended the session (08, 53, 57), or another transaction won.
  if (lost || /^(08|53|57|40001|40P01)/.test(error.code)) {
    return { status: 503, body: "the database did not answer; retry with the same key" };
  }
  // A value or a row that the database refuses, or a key that is too long.
  if (/^(22|23|IK008)/.test(error.code)) return { status: 400, body: "the database refuses this request" };
  return { status: 500, body: "a mistake of this service" };
}

const server = http.createServer(async (request, response) => {
  let answer = { status: 400, body: "X-User-ID and Idempotency-Key are required" };
  // A real service takes the user from the verified token.
  // A client may send the key in quotes or without them (RFC 9651): both are one key.
  const named = /^("?)([^"\\]+)\1$/.exec(request.headers["idempotency-key"]);
  const key = [request.headers["x-user-id"], "POST /payments", named?.[2]];
  try {
    const body = await buffer(request);
    if (key.every(Boolean)) answer = await inTransaction((client) => pay(client, key, request, body));
  } catch (error) {
    answer = failure(error);
  }
  response.writeHead(answer.status ?? 200, { "content-type": "application/json" }).end(answer.body);
});
server.listen(Number(process.env.PORT), "127.0.0.1");
