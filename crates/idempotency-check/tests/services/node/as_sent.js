// Stores each body of the first argument as its own answer, and replays it. pg declares no type of a parameter.
const assert = require("node:assert");
const { Client } = require("pg");

const FORMS = { bytes: (place) => `${place}::bytea`, string: (place) => `convert_to(${place}::text, 'UTF8')` };

async function main() {
  const client = new Client({ connectionString: process.env.DATABASE_URL });
  await client.connect();
  for (const { value, form, hex } of JSON.parse(process.argv[2])) {
    const sent = Buffer.from(hex, "hex");
    const body = form === "bytes" ? sent : sent.toString();
    const ensure = `select outcome, token, body
      from idempotency.ensure('ada', 'POST /notes', $1, idempotency.fingerprint(${FORMS[form]("$2")}))`;
    const complete = `select idempotency.complete('ada', 'POST /notes', $1, $3, body => ${FORMS[form]("$2")})`;
    for (const expected of ["claimed", "replayed"]) {
      await client.query("begin");
      const [claim] = (await client.query(ensure, [value, body])).rows;
      assert.equal(claim.outcome, expected, value);
      if (claim.outcome === "claimed") await client.query(complete, [value, body, claim.token]);
      else assert.deepEqual(claim.body, sent, value);
      await client.query("commit");
    }
  }
  await client.end();
}

main().catch((error) => {
  console.error(error);
  // The connection is open.
  process.exit(1);
});
