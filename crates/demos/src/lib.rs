//! Demos: whole services that run into trouble, such as storms of duplicates, hang-ups and killed processes, and then
//! check their own books. Each program exits with 0 only if every count is right. `examples/` in the root has the code
//! to copy.
//!
//! This library has what several of the programs need.

use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;
use std::{env, io, process, thread};

/// Holds every statement of a demo to the rules of a record.
pub const STRICT: &str = include_str!("../../../migrations/strict.sql");

/// Starts this program again, in the same process, with a server's `DATABASE_URL`. Returns only if that fails. A
/// variable of `environment` applies unless the caller has set it.
pub fn on_a_throw_away_server(environment: &[(&str, &str)]) -> anyhow::Error {
    let with_postgres = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../script/with-postgres"));
    let exec = || -> io::Result<io::Error> {
        let unset = environment.iter().filter(|(name, _)| env::var_os(name).is_none()).copied();
        let mut command = Command::new(with_postgres);
        Ok(command.envs(unset).arg(env::current_exe()?).args(env::args_os().skip(1)).exec())
    };
    let error = exec().unwrap_or_else(|error| error);
    anyhow::Error::new(error).context(format!("DATABASE_URL is not set, and {} did not run", with_postgres.display()))
}

/// Ends this process with its parent, which holds the other end of stdin. The kernel closes that end however the parent
/// dies, also by SIGKILL.
pub fn exit_with_parent() {
    // A plain thread: the runtime would wait for a blocked read of its own before it lets the process end.
    thread::spawn(|| {
        let _ = io::copy(&mut io::stdin().lock(), &mut io::sink());
        process::exit(1);
    });
}
