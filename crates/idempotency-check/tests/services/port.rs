//! A port for a service that a test starts.

use std::net::TcpListener;
use std::sync::atomic::{AtomicU32, Ordering};

/// A port that is free now. It is below the ports that the system gives to outgoing connections: one of these could
/// take it before the service does, and a connection that finds no service could be connected to itself.
pub(crate) fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let mut ports = std::iter::repeat_with(|| {
        let next = std::process::id() * 100 + NEXT.fetch_add(1, Ordering::Relaxed);
        u16::try_from(20_000 + next % 12_000).expect("it is below 32000")
    });
    let free = ports.by_ref().take(100).find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok());
    free.expect("a hundred ports are taken")
}
