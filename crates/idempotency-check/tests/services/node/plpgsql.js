// PL/pgSQL alone: plpgsql.sql has the key, the payment and the answer. This only passes requests on, as PostgREST does.
const http = require("node:http");
const { buffer } = require("node:stream/consumers");
const { Pool } = require("pg");

const pool = new Pool({ connectionString: process.env.DATABASE_URL, max: 20, connectionTimeoutMillis: 5000 });
// A connection may be lost at any time, idle or in use. Without these listeners, that would end the process.
pool.on("error", (error) => console.error(error.message));
pool.on("connect", (client) => client.on("error", (error) => console.error(error.message)));

const server = http.createServer(async (request, response) => {
  let answer;
  try {
    const { "x-user-id": user, "idempotency-key": key } = request.headers;
    // One statement in autocommit: it is a transaction, and commits by itself.
    [answer] = (await pool.query("select status, body from pay($1, $2, $3)", [user, key, await buffer(request)])).rows;
  } catch (error) {
    const status = error.code === "IK008" ? 400 : 503;
    answer = { status, body: "retry with the same key" };
  }
  response.writeHead(answer.status, { "content-type": "application/json" }).end(answer.body);
});
server.listen(Number(process.env.PORT), "127.0.0.1");
