//! Finds the programs, and the user that runs them. Nothing here installs anything.

use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::cluster::root;
use crate::keeper::User;

/// PostgreSQL's programs that Patroni calls. Ready-made builds often leave out the last two.
const SERVER_PROGRAMS: &[&str] =
    &["postgres", "initdb", "pg_ctl", "pg_controldata", "pg_isready", "pg_basebackup", "pg_rewind"];
/// Where packages install programs, after `PATH`.
const USUAL_PLACES: &str = "/usr/bin:/usr/local/bin:/usr/sbin:/usr/local/sbin:/opt/patroni/bin";

/// Patroni talks to etcd through its older API. Through API 3, a leader of a Patroni before 3.0.3 that is paused for
/// longer than its `ttl` can take the lock from its successor when it wakes. Then the successor's answers are lost:
/// <https://github.com/patroni/patroni/pull/2689>.
const WITH_API_2: &str = "--enable-v2";

#[derive(Clone, Debug)]
pub(crate) struct Programs {
    patroni: PathBuf,
    etcd: PathBuf,
    /// The directory of `postgres` and its tools.
    pub(crate) bindir: PathBuf,
    user: Option<User>,
}

impl Programs {
    /// Returns the reason if something is missing.
    pub(crate) fn find() -> Result<Self, String> {
        if !Path::new("/proc/self/cwd").exists() {
            return Err("there is no /proc here, which finds the processes of a node".to_owned());
        }
        let (patroni, etcd) = (program("patroni", "PATRONI_BIN")?, program("etcd", "ETCD_BIN")?);
        let programs = Self { patroni, etcd, bindir: bindir()?, user: User::of_servers() };
        for name in SERVER_PROGRAMS {
            let path = programs.bindir.join(name);
            if !path.exists() {
                return Err(format!("{} is missing", path.display()));
            }
        }
        programs.runs(&programs.patroni, &["--version"])?;
        programs.runs(&programs.etcd, &[WITH_API_2, "--version"])?;
        programs.runs(&programs.bindir.join("postgres"), &["--version"])?;
        Ok(programs)
    }

    /// A program in root's home, or one whose Python lacks a module, does not start.
    fn runs(&self, program: &Path, arguments: &[&str]) -> Result<(), String> {
        let output = self.command(program).args(arguments).output();
        let runs = output.is_ok_and(|output| output.status.success());
        let failed = || format!("`{} {}` fails as the servers' user", program.display(), arguments.join(" "));
        runs.then_some(()).ok_or_else(failed)
    }

    pub(crate) fn user(&self) -> Option<User> {
        self.user
    }

    pub(crate) fn patroni(&self) -> Command {
        self.command(&self.patroni)
    }

    pub(crate) fn etcd(&self) -> Command {
        let mut etcd = self.command(&self.etcd);
        etcd.arg(WITH_API_2);
        etcd
    }

    /// In a group of its own, so that Ctrl-C reaches the suite only, and without variables that would change Patroni,
    /// etcd, Python or libpq.
    fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_else(|| USUAL_PLACES.into()))
            .env("LC_ALL", "C.UTF-8")
            .current_dir("/")
            .stdin(Stdio::null())
            .process_group(0);
        if let Some(User { uid, gid }) = self.user {
            command.uid(uid).gid(gid);
        }
        command
    }
}

/// The program that `variable` names, or the first of that name in the usual places.
fn program(name: &str, variable: &str) -> Result<PathBuf, String> {
    if let Some(path) = std::env::var_os(variable).map(PathBuf::from) {
        return if path.exists() {
            Ok(path)
        } else {
            Err(format!("{variable} names {}, which is missing", path.display()))
        };
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(std::env::split_paths(USUAL_PLACES))
        .map(|directory| directory.join(name))
        .find(|path| path.is_file())
        .ok_or_else(|| {
            format!(
                "{name} is not installed; on Debian: apt-get install patroni etcd-server. Or set {variable} to its path"
            )
        })
}

/// The PostgreSQL that the rest of the suite uses.
fn bindir() -> Result<PathBuf, String> {
    let output =
        Command::new(root().join("script/postgres")).arg("bindir").output().map_err(|error| error.to_string())?;
    if output.status.success() {
        Ok(PathBuf::from(String::from_utf8_lossy(&output.stdout).trim()))
    } else {
        Err("script/postgres finds no PostgreSQL".to_owned())
    }
}
