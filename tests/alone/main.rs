//! Tests that need the server to themselves: one uses all there is of the machine, the other counts WAL. They take
//! turns; the tests of other binaries do not run beside them.

#[allow(dead_code, unused_imports, reason = "made for the tests of behaviour; these need little of it")]
#[path = "../behaviour/support.rs"]
mod support;

mod purge_races;
mod wal;

use tokio::sync::{Mutex, MutexGuard};

/// Until this value is dropped, no other test of this binary does its work.
async fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::const_new(());
    TURN.lock().await
}
