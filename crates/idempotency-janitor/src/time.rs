//! Times and durations as a person reads them.

use std::time::Duration;

use chrono::{DateTime, Utc};

/// A duration of more than 1000 years is shown without its number, because the library reads an `expires_at` of
/// `infinity` as the end of the year 9999.
const MANY_YEARS: u64 = 1_000 * 366 * 24 * 60 * 60;

/// A duration in at most two units, rounded down, such as `2h 5m`.
pub(crate) fn span(duration: Duration) -> String {
    let seconds = duration.as_secs();
    if seconds > MANY_YEARS {
        return "more than 1000 years".to_owned();
    }
    let unit = match seconds {
        0..3_600 => 1,
        3_600..86_400 => 60,
        _ => 3_600,
    };
    let rounded = humantime::format_duration(Duration::from_secs(seconds - seconds % unit)).to_string();
    let two = rounded.split(' ').take(2).collect::<Vec<_>>().join(" ");
    // The library writes `1day`.
    ["day", "month", "year"].iter().fold(two, |text, unit| text.replace(unit, &format!(" {unit}")))
}

/// A time in UTC, and the distance from now by this machine's clock, such as `2026-11-28 06:30:12 UTC, 5m ago`.
pub(crate) fn moment(at: DateTime<Utc>) -> String {
    let ago = Utc::now() - at;
    let distance = match ago.to_std() {
        Ok(ago) => format!("{} ago", span(ago)),
        Err(_) => format!("in {}", span((-ago).to_std().unwrap_or_default())),
    };
    format!("{}, {distance}", at.format("%Y-%m-%d %H:%M:%S UTC"))
}
