// What the packages are put around: one payment, inserted with pg in a statement of its own.
const { Pool } = require("pg");

const pool = new Pool({ connectionString: process.env.DATABASE_URL, max: 20, connectionTimeoutMillis: 5000 });
// An idle connection may be lost at any time. Without a listener, this would end the process.
pool.on("error", (error) => console.error(error.message));

exports.record = async ({ amount, currency }) => {
  const insert = "insert into payments (amount, currency) values ($1, $2) returning id";
  const [{ id }] = (await pool.query(insert, [amount, currency])).rows;
  return { id: Number(id), amount, currency };
};
