//! The processor time of this process and of the server, from Linux's `/proc`.

use std::fs;

use anyhow::Context as _;
use sqlx::PgConnection;

/// The processor time of this process and of the server's, in seconds.
pub(crate) fn processor_time(postmaster: i32) -> anyhow::Result<f64> {
    let mut ticks = of("self", |_| true)?.unwrap_or_default();
    for process in fs::read_dir("/proc")? {
        let name = process?.file_name();
        let Some(name) = name.to_str().filter(|name| name.bytes().all(|byte| byte.is_ascii_digit())) else { continue };
        // A backend may end at this moment.
        ticks += of(name, |parent| parent == postmaster).unwrap_or_default().unwrap_or_default();
    }
    // Linux counts in hundredths of a second everywhere.
    Ok(ticks as f64 / 100.0)
}

/// The ticks of a process and of its children that have ended, if its parent is the right one.
fn of(process: &str, wanted: impl Fn(i32) -> bool) -> anyhow::Result<Option<u64>> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat"))?;
    // The name of the program may contain spaces and brackets.
    let fields: Vec<&str> = stat.rsplit_once(')').context("a stat has a name")?.1.split_whitespace().collect();
    let field = |at: usize| fields.get(at).context("a stat has fields");
    if !wanted(field(1)?.parse()?) {
        return Ok(None);
    }
    Ok(Some(field(11)?.parse::<u64>()? + field(12)?.parse::<u64>()?))
}

/// The process that is the parent of all backends.
pub(crate) async fn postmaster(conn: &mut PgConnection) -> anyhow::Result<i32> {
    let backend: i32 = sqlx::query_scalar("select pg_backend_pid()").fetch_one(conn).await?;
    let stat = fs::read_to_string(format!("/proc/{backend}/stat"))?;
    let fields = stat.rsplit_once(')').context("a stat has a name")?.1;
    Ok(fields.split_whitespace().nth(1).context("a stat has fields")?.parse()?)
}
