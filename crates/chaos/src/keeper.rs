//! The directory of several servers, and the process that cleans up after them: when the suite ends, however it ends,
//! the keeper ends every process that works in the directory, and removes it.

use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, ensure};
use rig::child::Kept;

/// Waits for EOF on its standard input, whose other end the suite has. Patroni ends first, because it would start a
/// server again; an immediate shutdown of the servers removes their shared memory.
const KEEPER: &str = r#"
    trap '' HUP INT QUIT PIPE TERM
    within() {
        for process in /proc/[0-9]*; do
            case $(readlink "$process/cwd") in $1) echo "${process#/proc/}" ;; esac
        done 2>/dev/null
    }
    echo ready
    read -r _
    for process in $(within "$DIRECTORY/*"); do
        if [ -e "/proc/$process/cwd/PG_VERSION" ]; then kill -CONT "$process"; else kill -KILL "$process"; fi
    done 2>/dev/null
    for file in "$DIRECTORY"/*/*/postmaster.pid; do
        read -r postmaster <"$file" || continue
        for process in $(within "${file%/postmaster.pid}"); do
            [ "$process" != "$postmaster" ] || kill -QUIT "$process"
        done
    done 2>/dev/null
    for _ in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
        [ "$(within "$DIRECTORY/*")" ] || break
        sleep 0.25
    done
    for process in $(within "$DIRECTORY/*"); do kill -KILL "$process"; done 2>/dev/null
    while [ "$(within "$DIRECTORY/*")" ]; do sleep 0.1; done
    for file in "$DIRECTORY"/*/*/postmaster.pid; do
        # The shared memory of a server that was killed.
        ipcrm -m "$(awk 'NR == 7 { print $2 }' "$file")"
    done 2>/dev/null
    rm -rf "$DIRECTORY"
"#;

pub(crate) struct Keeper {
    _process: Kept,
    directory: PathBuf,
    user: Option<User>,
}

impl Keeper {
    /// `user` is the account of the servers.
    pub(crate) fn start(user: Option<User>) -> anyhow::Result<Self> {
        // In /tmp, because the path of a Unix socket must stay below about 104 bytes.
        let made = Command::new("mktemp").args(["-d", "/tmp/pgi-servers.XXXXXX"]).output()?;
        let directory = PathBuf::from(String::from_utf8(made.stdout)?.trim());
        let process = Kept::start(Command::new("sh").args(["-c", KEEPER]).env("DIRECTORY", &directory))?;
        let keeper = Self { _process: process, directory, user };
        if let Some(User { uid, gid }) = user {
            chown(&keeper.directory, Some(uid), Some(gid))?;
        }
        Ok(keeper)
    }

    /// A directory in the keeper's, for one server and its processes.
    pub(crate) fn directory(&self, name: &str) -> anyhow::Result<PathBuf> {
        let directory = self.directory.join(name);
        std::fs::create_dir(&directory)?;
        if let Some(User { uid, gid }) = self.user {
            chown(&directory, Some(uid), Some(gid))?;
        }
        Ok(directory)
    }
}

/// The account of the servers, where the suite runs as root: PostgreSQL refuses to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct User {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
}

impl User {
    pub(crate) fn of_servers() -> Option<Self> {
        if id(&["-u"])? != 0 {
            return None;
        }
        // As script/postgres does.
        let account = if id(&["-u", "postgres"]).is_some() { "postgres" } else { "nobody" };
        Some(Self { uid: id(&["-u", account])?, gid: id(&["-g", account])? })
    }
}

fn id(arguments: &[&str]) -> Option<u32> {
    let output = Command::new("id").args(arguments).stderr(Stdio::null()).output().ok()?;
    String::from_utf8(output.stdout).ok()?.trim().parse().ok()
}

/// Every process that works in this directory or below it: PostgreSQL's in the data directory, Patroni's and its tools'
/// above it.
pub(crate) fn processes_within(directory: &Path) -> Vec<u32> {
    let Ok(processes) = std::fs::read_dir("/proc") else { return Vec::new() };
    processes
        .filter_map(|entry| {
            let entry = entry.ok()?;
            let process: u32 = entry.file_name().to_str()?.parse().ok()?;
            let works_in = std::fs::read_link(entry.path().join("cwd")).ok()?;
            works_in.starts_with(directory).then_some(process)
        })
        .collect()
}

/// One `kill` for all of them, so that they stop or end at the same time.
pub(crate) fn signal_all(signal: &str, processes: &[u32]) -> anyhow::Result<()> {
    let processes: Vec<_> = processes.iter().map(u32::to_string).collect();
    let sent = Command::new("kill").arg(signal).args(processes).stderr(Stdio::null()).status()?;
    ensure!(sent.success(), "kill {signal}: {sent}");
    Ok(())
}

/// If init does not reap at once, a killed postmaster stays a zombie, which the next one takes for alive. The file must
/// stay, because it names the shared memory. So it gets the number of another process that has ended.
pub(crate) fn bury(file: &Path) -> anyhow::Result<()> {
    // Without the file, the server has ended by itself.
    let Ok(text) = std::fs::read_to_string(file) else { return Ok(()) };
    let (_, rest) = text.split_once('\n').context("a postmaster.pid without lines")?;
    let mut ended = Command::new("true").spawn()?;
    let process = ended.id();
    ended.wait()?;
    std::fs::write(file, format!("{process}\n{rest}"))?;
    Ok(())
}
