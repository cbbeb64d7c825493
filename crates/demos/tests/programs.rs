//! Each program runs on a server of its own or of `DATABASE_URL`, and ends with right books. `script/test` runs payments
//! by its script, and `script/prove` retrying_clients.

use std::process::Command;

/// One after the other, because some of them depend on time.
#[test]
fn every_program_ends_with_right_books() {
    for program in [
        env!("CARGO_BIN_EXE_event_consumer"),
        env!("CARGO_BIN_EXE_rides"),
        env!("CARGO_BIN_EXE_unknown_outcomes"),
        env!("CARGO_BIN_EXE_webhook_receiver"),
    ] {
        let output = Command::new(program).output().expect("cargo has built it");
        let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        let end = stdout.trim_end().lines().next_back().unwrap_or_default();
        // Only a broker may be missing: where there is one, a demo counts.
        let right =
            output.status.success() && (end == "every count is right" || end.starts_with("skipped: nats-server"));
        assert!(right, "{program}: {}\n{stdout}\n{stderr}", output.status);
    }
}
