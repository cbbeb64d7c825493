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

#[derive(Clone, Debug)]
pub(crate) struct Programs {
    patroni: PathBuf,
    etcd: PathBuf,
    /// The directory of `postgres` and its tools.
    pub(crate) bindir: PathBuf,
    user: Option<User>,
    pub(crate) api: EtcdApi,
}

/// How Patroni talks to etcd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EtcdApi {
    V2,
    V3,
}

impl EtcdApi {
    /// Patroni's name of it.
    pub(crate) fn section(self) -> &'static str {
        match self {
            Self::V2 => "etcd",
            Self::V3 => "etcd3",
        }
    }
}

/// Before this version, and through etcd's API 3 only, a leader that is paused for longer than its `ttl` can take the
/// lock from its successor when it wakes. Then the answers of the successor are lost:
/// <https://github.com/patroni/patroni/pull/2689>.
const SAFE_WITH_V3: [u32; 3] = [3, 0, 3];
/// `etcd` or `etcd3`, against the choice by version.
const API_VARIABLE: &str = "PATRONI_ETCD_API";

impl Programs {
    /// Returns the reason if something is missing.
    pub(crate) fn find() -> Result<Self, String> {
        if !Path::new("/proc/self/cwd").exists() {
            return Err("there is no /proc here, which finds the processes of a node".to_owned());
        }
        let (patroni, etcd) = (program("patroni", "PATRONI_BIN")?, program("etcd", "ETCD_BIN")?);
        let mut programs = Self { patroni, etcd, bindir: bindir()?, user: User::of_servers(), api: EtcdApi::V3 };
        for name in SERVER_PROGRAMS {
            let path = programs.bindir.join(name);
            if !path.exists() {
                return Err(format!("{} is missing", path.display()));
            }
        }
        programs.version(&programs.etcd)?;
        programs.version(&programs.bindir.join("postgres"))?;
        programs.api = api(&programs.version(&programs.patroni)?)?;
        Ok(programs)
    }

    /// A program in root's home, or one whose Python lacks a module, does not start.
    fn version(&self, program: &Path) -> Result<String, String> {
        let output = self.command(program).arg("--version").stderr(Stdio::null()).output();
        let output = output.ok().filter(|output| output.status.success());
        let output = output.ok_or_else(|| format!("`{} --version` fails as the servers' user", program.display()))?;
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    pub(crate) fn user(&self) -> Option<User> {
        self.user
    }

    pub(crate) fn patroni(&self) -> Command {
        self.command(&self.patroni)
    }

    pub(crate) fn etcd(&self) -> Command {
        self.command(&self.etcd)
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

fn api(patroni_version: &str) -> Result<EtcdApi, String> {
    match std::env::var(API_VARIABLE).as_deref() {
        Ok("etcd") => Ok(EtcdApi::V2),
        Ok("etcd3") => Ok(EtcdApi::V3),
        Ok(other) => Err(format!("{API_VARIABLE} is {other:?}, neither etcd nor etcd3")),
        Err(_) => Ok(safe_api(patroni_version)),
    }
}

fn safe_api(patroni_version: &str) -> EtcdApi {
    let numbers = patroni_version.trim().rsplit(' ').next().unwrap_or_default().split('.');
    let version: Vec<u32> = numbers.map_while(|number| number.parse().ok()).collect();
    if version.as_slice() < SAFE_WITH_V3.as_slice() { EtcdApi::V2 } else { EtcdApi::V3 }
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

#[cfg(test)]
mod tests {
    use super::{EtcdApi, safe_api};

    #[test]
    fn a_patroni_that_overwrites_the_leader_key_uses_the_older_api() {
        for (version, api) in [
            ("patroni 3.0.2\n", EtcdApi::V2),
            ("patroni 2.1.7", EtcdApi::V2),
            ("patroni 3.0.3", EtcdApi::V3),
            ("patroni 4.1.5", EtcdApi::V3),
        ] {
            assert_eq!(safe_api(version), api, "{version}");
        }
    }
}
