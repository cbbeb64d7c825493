//! Records the decisions that were made in this console, for the page `/log`, on standard output, and in the
//! file of `--log`. If standard output cannot be written, the log of the process has the decision.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{self, Write as _, stdout};
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use chrono::{DateTime, Utc};
use pg_idempotency::Key;
use pg_idempotency::operator::State;
use serde_json::json;
use tokio::net::unix::pipe;

use crate::failure::{Failure, printable};
use crate::process::json_line;

/// How many of the last decisions the page shows.
pub(super) const KEPT: usize = 200;
/// How much of a reason or of a name the page keeps, in characters. A form may send 2 MiB.
const SHOWN: usize = 500;

/// A decision that the database has committed.
#[derive(Clone)]
pub(super) struct Made {
    pub(super) at: DateTime<Utc>,
    pub(super) operator: String,
    /// The decision in a few words, such as *resolved*.
    pub(super) decision: String,
    pub(super) key: Key,
    /// The state of the record before the decision.
    pub(super) state: State,
    pub(super) token: i64,
    pub(super) reason: String,
    /// Whether the decision is missing in the file, or is not there yet. All clones share the value.
    pub(super) unwritten: Arc<AtomicBool>,
}

impl Made {
    fn in_json(&self) -> String {
        json_line(&json!({
            "at": self.at.to_rfc3339(),
            "operator": self.operator,
            "decision": self.decision,
            "scope": self.key.scope(),
            "operation": self.key.operation(),
            "value": self.key.value(),
            "state": self.state.to_string(),
            // The token is a string, because many readers of JSON round numbers beyond 2^53.
            "token": self.token.to_string(),
            "reason": self.reason,
        }))
    }
}

pub(super) struct Decisions {
    pub(super) since: DateTime<Utc>,
    pub(super) file: Option<PathBuf>,
    /// Whether the file may end with a part of a line, because a disk was full.
    torn: AtomicBool,
    made: Mutex<VecDeque<Made>>,
}

impl Decisions {
    /// Fails if the file cannot be written, because an operator must not find the log empty after the first decision.
    pub(super) fn new(file: Option<PathBuf>) -> Result<Self, Failure> {
        if let Some(path) = &file {
            append(path, "").map_err(|source| Failure::LogFile { path: path.clone(), source })?;
        }
        Ok(Self { since: Utc::now(), file, torn: AtomicBool::new(false), made: Mutex::default() })
    }

    /// Records a decision. `line` describes the decision. The decision is made, so no error of this function may look
    /// like a failure of the decision. If the log file cannot be written, returns the error. The page of the decision
    /// shows this error.
    pub(super) fn record(&self, made: Made, line: &str) -> Option<io::Error> {
        let (operator, line) = (printable(&made.operator), printable(line));
        // The page has the decision before the first write, because a write may take long.
        made.unwritten.store(self.file.is_some(), Ordering::Relaxed);
        self.note(made.clone());
        // Standard output may have no reader, or a full disk. Otherwise the log has no line, because both often lead to
        // the same terminal or journal.
        if stdout().write_all(format!("{} {operator}: {line}\n", made.at.to_rfc3339()).as_bytes()).is_err() {
            tracing::info!(%operator, "{line}");
        }
        let error = self.write(&made.in_json()).err();
        if let Some(error) = &error {
            tracing::warn!(%operator, %error, "the decision is made, but is missing in the log file: {line}");
        }
        made.unwritten.store(error.is_some(), Ordering::Relaxed);
        error
    }

    fn note(&self, mut made: Made) {
        for text in [&mut made.operator, &mut made.reason] {
            if let Some((end, _)) = text.char_indices().nth(SHOWN) {
                text.truncate(end);
                text.push('…');
            }
        }
        let mut kept = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        kept.push_front(made);
        kept.truncate(KEPT);
    }

    fn write(&self, line: &str) -> io::Result<()> {
        let Some(path) = &self.file else { return Ok(()) };
        // The line break separates the new line from a torn line, so that the new line can be read.
        let begin = if self.torn.load(Ordering::Relaxed) { "\n" } else { "" };
        let written = append(path, &format!("{begin}{line}"));
        self.torn.store(written.is_err(), Ordering::Relaxed);
        written
    }

    /// The decisions, the newest first.
    pub(super) fn made(&self) -> Vec<Made> {
        self.made.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }
}

/// Appends a text durably. The file is opened each time, so that it may be rotated.
fn append(path: &Path, text: &str) -> io::Result<()> {
    let mut file = open(path)?;
    if text.is_empty() {
        return Ok(());
    }
    file.write_all(text.as_bytes())?;
    match file.sync_data() {
        // A pipe or a terminal cannot be synchronized.
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => Ok(()),
        synced => synced,
    }
}

/// Only the owner of a new file may read the keys and the reasons.
fn open(path: &Path) -> io::Result<File> {
    if !path.metadata().is_ok_and(|metadata| metadata.file_type().is_fifo()) {
        return OpenOptions::new().append(true).create(true).mode(0o600).open(path);
    }
    // A pipe is opened without waiting, and stays so. Otherwise, the process would wait for a reader of the pipe, and
    // would not end at a signal.
    let pipe = pipe::OpenOptions::new().open_sender(path).and_then(pipe::Sender::into_nonblocking_fd);
    pipe.map(File::from).map_err(|error| io::Error::new(error.kind(), format!("no process reads this pipe: {error}")))
}
