//! The effects of a request: the difference between a reading before the request and a reading after it.

use std::fmt;
use std::process::Stdio;
use std::time::Duration;

use sqlx::postgres::PgConnectOptions;
use sqlx::{AssertSqlSafe, Column as _, Connection as _, PgConnection, Row as _, TypeInfo as _, ValueRef as _};
use tokio::process::Command;
use tokio::time::{Instant, sleep, timeout};

use crate::Error;

/// The pause between two readings. The program reads until two readings in a row are equal, so that a late effect
/// counts for the try that caused it.
const APART: Duration = Duration::from_millis(50);
/// How long the effects may go on changing, and how long one reading may take.
const PATIENCE: Duration = Duration::from_secs(10);
/// How many decimals of a number are compared. The comparison is exact.
const DECIMALS: usize = 9;

#[derive(Clone, Debug, PartialEq, Eq)]
enum Cell {
    Number(i128),
    Text(String),
}

/// The rows of one reading.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Reading(Vec<Vec<Cell>>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Change {
    None,
    By(i128),
    To(String),
}

/// The difference between two readings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Effect(Vec<Vec<Change>>);

pub(crate) struct Effects {
    options: PgConnectOptions,
    connection: Option<PgConnection>,
    query: Option<String>,
    command: Option<String>,
}

impl Effects {
    pub(crate) fn new(options: PgConnectOptions, query: Option<String>, command: Option<String>) -> Self {
        Self { options, connection: None, query, command }
    }

    /// Connects to the database, so that a wrong URL is reported before the service is started.
    pub(crate) async fn reach(&mut self) -> Result<(), Error> {
        let connecting = timeout(PATIENCE, PgConnection::connect_with(&self.options)).await;
        let refused = |_| Error::Database(sqlx::Error::PoolTimedOut);
        self.connection = Some(connecting.map_err(refused)?.map_err(Error::Database)?);
        Ok(())
    }

    /// Reads the effects until two readings in a row are equal.
    pub(crate) async fn settled(&mut self, key: &str) -> Result<Reading, Error> {
        let started = Instant::now();
        let mut reading = self.read(key).await?;
        loop {
            sleep(APART).await;
            let next = self.read(key).await?;
            if next == reading {
                return Ok(reading);
            }
            if started.elapsed() > PATIENCE {
                return Err(Error::Effects("they differ from reading to reading, without a request".to_owned()));
            }
            reading = next;
        }
    }

    /// Reads the effects once.
    pub(crate) async fn read(&mut self, key: &str) -> Result<Reading, Error> {
        let mut rows = Vec::new();
        if let Some(query) = &self.query {
            let query = query.replace("{key}", &key.replace('\'', "''"));
            let read = timeout(PATIENCE, self.query(&query, key)).await;
            rows.extend(read.map_err(|_| Error::Effects("the query hangs".to_owned()))??);
        }
        if let Some(command) = &self.command {
            let reading = output(command.replace("{key}", key));
            let text = timeout(PATIENCE, reading).await;
            let text = text.map_err(|_| Error::Effects("the command hangs".to_owned()))??;
            rows.extend(text.lines().map(|line| line.split_whitespace().map(|word| cell(word, key)).collect()));
        }
        Ok(Reading(rows))
    }

    async fn query(&mut self, query: &str, key: &str) -> Result<Vec<Vec<Cell>>, Error> {
        let mut connection = match self.connection.take() {
            Some(connection) => connection,
            None => PgConnection::connect_with(&self.options).await.map_err(Error::Database)?,
        };
        // The simple protocol returns the values of every type as text.
        let rows = sqlx::raw_sql(AssertSqlSafe(query.to_owned())).fetch_all(&mut connection).await;
        let rows = rows.map_err(|error| Error::Effects(error.to_string()))?;
        self.connection = Some(connection);
        let text = |row: &sqlx::postgres::PgRow, column: usize| {
            let value = row.try_get_raw(column).map_err(|error| error.to_string())?;
            let text = if value.is_null() { "null" } else { value.as_str().map_err(|error| error.to_string())? };
            let is_number = matches!(
                row.column(column).type_info().name(),
                "INT2" | "INT4" | "INT8" | "NUMERIC" | "FLOAT4" | "FLOAT8"
            );
            Ok(if is_number { cell(text, key) } else { Cell::Text(text.replace(key, "{key}")) })
        };
        let cells = |row| (0..sqlx::Row::len(row)).map(|column| text(row, column)).collect();
        rows.iter().map(cells).collect::<Result<_, String>>().map_err(Error::Effects)
    }
}

async fn output(command: String) -> Result<String, Error> {
    let output = Command::new("sh").args(["-c", &command]).stdin(Stdio::null()).kill_on_drop(true).output().await;
    let output = output.map_err(|error| Error::Effects(error.to_string()))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(Error::Effects(format!("the command ended with {}: {said}", output.status)))
}

fn cell(text: &str, key: &str) -> Cell {
    number(text).map_or_else(|| Cell::Text(text.replace(key, "{key}")), Cell::Number)
}

/// Parses a decimal number. Returns the number times 10 to the power of `DECIMALS`.
fn number(text: &str) -> Option<i128> {
    let (sign, digits) = text.strip_prefix('-').map_or((1, text), |digits| (-1, digits));
    let (whole, part) = digits.split_once('.').unwrap_or((digits, ""));
    let is_decimal = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
    if whole.is_empty() || !is_decimal(whole) || !is_decimal(part) {
        return None;
    }
    let part: String = part.chars().chain(std::iter::repeat('0')).take(DECIMALS).collect();
    Some(sign * format!("{whole}{part}").parse::<i128>().ok()?)
}

fn in_decimals(number: i128) -> String {
    let scale = 10i128.pow(DECIMALS as u32);
    let (whole, part) = (number.unsigned_abs() / scale.unsigned_abs(), number.unsigned_abs() % scale.unsigned_abs());
    let part = format!(".{part:0DECIMALS$}");
    let sign = if number < 0 { "-" } else { "+" };
    format!("{sign}{whole}{}", part.trim_end_matches('0').trim_end_matches('.'))
}

impl Reading {
    /// The changes since the reading `before`. A number in a missing row counts as zero.
    pub(crate) fn since(&self, before: &Self) -> Effect {
        let change = |row: usize, column: usize| {
            let at = |reading: &Self| reading.0.get(row).and_then(|cells| cells.get(column)).cloned();
            match (at(before), at(self)) {
                (before, after) if before == after => Change::None,
                (Some(Cell::Number(before)), Some(Cell::Number(after))) => Change::By(after - before),
                (None, Some(Cell::Number(after))) => Change::By(after),
                (Some(Cell::Number(before)), None) => Change::By(-before),
                (_, Some(Cell::Number(after))) => Change::To(in_decimals(after)),
                (_, Some(Cell::Text(after))) => Change::To(after),
                (_, None) => Change::To("gone".to_owned()),
            }
        };
        let width = |row: usize| [self, before].map(|it| it.0.get(row).map_or(0, Vec::len)).into_iter().max();
        let rows = self.0.len().max(before.0.len());
        let changes = |row| (0..width(row).unwrap_or(0)).map(|column| change(row, column)).collect();
        Effect((0..rows).map(changes).collect())
    }
}

impl Effect {
    pub(crate) fn is_none(&self) -> bool {
        self.0.iter().flatten().all(|change| matches!(change, Change::None | Change::By(0)))
    }

    /// Whether both effects contain the same changes. If the last rows contain no change, they do not matter.
    pub(crate) fn equals(&self, other: &Self) -> bool {
        let changed = |effect: &Self| {
            let mut rows = effect.0.clone();
            while rows.pop_if(|row| row.iter().all(|change| *change == Change::None)).is_some() {}
            rows
        };
        changed(self) == changed(other)
    }

    /// Whether this effect goes beyond `once`, which is the effect of one request.
    pub(crate) fn exceeds(&self, once: &Self) -> bool {
        let once = |row: usize, column: usize| once.0.get(row).and_then(|cells| cells.get(column));
        self.0.iter().enumerate().any(|(row, cells)| {
            cells.iter().enumerate().any(|(column, change)| match (change, once(row, column)) {
                (Change::By(by), Some(Change::By(once))) => by.abs() > once.abs() || by.signum() * once.signum() < 0,
                (Change::By(_) | Change::To(_), None | Some(Change::None)) => true,
                _ => false,
            })
        })
    }

    /// The changes as texts for the report, with one list for each row.
    pub(crate) fn rows(&self) -> Vec<Vec<String>> {
        self.0.iter().map(|row| row.iter().map(ToString::to_string).collect()).collect()
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("="),
            Self::By(by) => f.write_str(&in_decimals(*by)),
            Self::To(text) => write!(f, "'{text}'"),
        }
    }
}

impl fmt::Display for Effect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_none() {
            return f.write_str("nothing");
        }
        let rows: Vec<_> = self.rows().into_iter().map(|row| row.join(" ")).collect();
        f.write_str(&rows.join(" | "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Reading {
        pub(crate) fn of(rows: &[&[&str]]) -> Self {
            Self(rows.iter().map(|row| row.iter().map(|text| cell(text, "k1")).collect()).collect())
        }
    }

    #[test]
    fn numbers_are_compared_as_exact_differences() {
        let effect = Reading::of(&[&["3", "100.30"]]).since(&Reading::of(&[&["2", "0.1"]]));
        assert_eq!(effect.to_string(), "+1 +100.2");
        assert!(effect.equals(&Reading::of(&[&["9", "100.2"]]).since(&Reading::of(&[&["8", "0"]]))));
        assert_eq!(number("1e5"), None);
        assert_eq!(number("-0.5").map(in_decimals).as_deref(), Some("-0.5"));
    }

    #[test]
    fn a_second_effect_exceeds_and_half_an_effect_does_not() {
        let zero = Reading::of(&[&["0", "0"]]);
        let once = Reading::of(&[&["1", "100"]]).since(&zero);
        for (after, exceeds) in [(["2", "200"], true), (["1", "0"], false), (["0", "0"], false), (["0", "-100"], true)]
        {
            assert_eq!(Reading::of(&[&after]).since(&zero).exceeds(&once), exceeds, "{after:?}");
        }
        assert!(zero.since(&zero).is_none());
    }

    #[test]
    fn a_new_row_is_an_effect_and_its_key_is_masked() {
        let none = Reading::of(&[]);
        let once = Reading::of(&[&["k1", "paid"]]).since(&none);
        assert_eq!(once.to_string(), "'{key}' 'paid'");
        let twice = Reading::of(&[&["k1", "paid"], &["k1", "paid"]]).since(&none);
        assert!(twice.exceeds(&once) && !once.exceeds(&twice) && !once.equals(&twice));
    }

    #[test]
    fn a_transfer_between_two_rows_is_not_lost_in_a_sum() {
        let before = Reading::of(&[&["a", "500"], &["b", "0"]]);
        let once = Reading::of(&[&["a", "400"], &["b", "100"]]).since(&before);
        let twice = Reading::of(&[&["a", "300"], &["b", "200"]]).since(&before);
        assert_eq!(once.to_string(), "= -100 | = +100");
        assert!(twice.exceeds(&once));
    }
}
