//! The command line.

use std::io::{ErrorKind, Write as _, stderr, stdout};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, ValueEnum};
use indicatif::{ProgressBar, ProgressFinish, ProgressStyle};
use reqwest::Method;
use reqwest::header::{HeaderName, HeaderValue};
use url::Url;

use crate::client::{Request, other_body};
use crate::judge::{Compare, Interruption};
use crate::run::Progress;
use crate::{Check, Error};

/// Interrupts a service at each message to its PostgreSQL server, retries the request with the same idempotency key,
/// and reports whether the operation had one effect and one answer.
///
/// The command after `--` starts the service, with the URL of a proxy in DATABASE_URL. `{key}` in the URL, a header,
/// the body or the effects stands for the key. Exit codes: 0 without findings, 1 with findings, 2 if the check could
/// not run, or if its report could not be written.
#[derive(Debug, Parser)]
#[command(version)]
pub struct Arguments {
    /// The database of the service, as a URL of PostgreSQL
    #[arg(long, value_name = "URL")]
    database: String,
    /// A query that shows the effects; the check compares the change of each number
    #[arg(long, value_name = "SQL", required_unless_present = "effects_command")]
    effects: Option<String>,
    /// A shell command that prints effects outside the database
    #[arg(long, value_name = "CMD")]
    effects_command: Option<String>,
    /// The body of the request, as JSON
    #[arg(long, group = "content", value_name = "BODY")]
    json: Option<String>,
    /// The body of the request, as a form
    #[arg(long, group = "content", value_name = "BODY")]
    form: Option<String>,
    /// The body of the request, without a content type
    #[arg(long, group = "content", value_name = "BODY")]
    body: Option<String>,
    /// Another body, which the service has to refuse under the same key [default: the body with its first number, or
    /// else its first string, changed]
    #[arg(long, value_name = "BODY")]
    other_json: Option<String>,
    /// A header of another user, which replaces the header with the same name
    #[arg(long, value_name = "N: V", value_parser = header)]
    other_header: Vec<(String, String)>,
    /// The method [default: POST]
    #[arg(short = 'X', long = "request", value_name = "METHOD")]
    method: Option<Method>,
    /// A header
    #[arg(short = 'H', long = "header", value_name = "N: V", value_parser = header)]
    headers: Vec<(String, String)>,
    /// The header of the key [default: Idempotency-Key, unless {key} is in another place]
    #[arg(long, value_name = "NAME")]
    key_header: Option<HeaderName>,
    /// The statuses after which the client retries
    #[arg(long, value_delimiter = ',', default_value = "202,409,425,429,500,502,503,504")]
    again: Vec<u16>,
    /// How long the client retries
    #[arg(long, default_value = "30s", value_parser = humantime::parse_duration)]
    patience: Duration,
    /// How two answers are compared; `status` compares only the status, and so overlooks the id of another payment
    #[arg(long, value_enum, default_value = "body")]
    compare: Compare,
    /// The environment variable in which the service gets the URL of the database
    #[arg(long, value_name = "NAME", default_value = "DATABASE_URL")]
    env: String,
    /// Write the report to this file, as JSON
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// Repeat one try, such as 7:lost-after
    #[arg(long, value_parser = one_try)]
    only: Option<(usize, Interruption)>,
    /// The address of the proxy, for a service that the check does not start
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:0")]
    listen: SocketAddr,
    /// The URL of the request
    url: String,
    /// The command that starts the service
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<String>,
}

/// Runs the check, and prints its report. Returns the exit code.
pub async fn run(arguments: Arguments) -> u8 {
    let file = arguments.report.clone();
    let report = match arguments.check() {
        Ok(check) => check.run().await,
        Err(error) => Err(error),
    };
    let report = match report {
        Ok(report) => report,
        Err(error) => return fail(&error.in_one_line()),
    };
    let printed = writeln!(stdout(), "{report}");
    if let Some(file) = &file {
        let text = serde_json::to_vec_pretty(&report).map_err(|error| error.to_string());
        let written = text.and_then(|text| std::fs::write(file, text).map_err(|error| error.to_string()));
        if let Err(error) = written {
            let rest = if printed.is_ok() { "is on standard output only" } else { "is lost" };
            return fail(&format!("{} cannot be written, so the report {rest}: {error}", file.display()));
        }
    }
    match printed {
        // A reader that closes the pipe early, as `head` does, is not a failure.
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            let rest = file.map_or("is lost".to_owned(), |file| format!("is in {} only", file.display()));
            fail(&format!("standard output cannot be written, so the report {rest}: {error}"))
        }
        _ => u8::from(!report.findings.is_empty()),
    }
}

fn fail(what: &str) -> u8 {
    let _ = writeln!(stderr(), "idempotency-check: {what}");
    2
}

/// Writes the progress to stderr. A terminal shows a bar instead of a line for each try.
fn progress() -> impl Fn(Progress<'_>) {
    // The bar has no colours, and consists of characters that every terminal can show.
    let style = ProgressStyle::with_template("{wide_bar} {pos}/{len} tries, {eta} left").expect("a template");
    let bar = ProgressBar::no_length().with_style(style.progress_chars("=> ")).with_finish(ProgressFinish::AndClear);
    move |progress| match progress {
        Progress::Tried { done, all, .. } if !bar.is_hidden() => {
            bar.set_length(all as u64);
            bar.set_position(done as u64);
        }
        Progress::Tried { line, .. } | Progress::Line(line) => bar.suspend(|| {
            let _ = writeln!(stderr(), "{line}");
        }),
    }
}

impl Arguments {
    fn check(self) -> Result<Check, Error> {
        let mut check = Check::new(self.database.clone())
            .again(self.again.clone())
            .patience(self.patience)
            .compare(self.compare)
            .listen(self.listen)
            .on_progress(progress());
        if let Some(query) = &self.effects {
            check = check.effects(query);
        }
        if let Some(command) = &self.effects_command {
            check = check.effects_command(command);
        }
        if let Some((message, interruption)) = self.only {
            check = check.only(message, interruption);
        }
        let (command, variable) = (self.command.clone(), self.env.clone());
        Ok(check.http(self.request(), command, variable))
    }

    fn request(self) -> Request {
        let mut headers = self.headers;
        let content_type = match (&self.json, &self.form) {
            (Some(_), _) => Some("application/json"),
            (_, Some(_)) => Some("application/x-www-form-urlencoded"),
            _ => None,
        };
        let is_named = headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("content-type"));
        headers.extend(content_type.filter(|_| !is_named).map(|it| ("content-type".to_owned(), it.to_owned())));
        let body = self.json.or(self.form).or(self.body);
        let other_body = self.other_json.or_else(|| body.as_deref().and_then(other_body));
        let texts = headers.iter().map(|(_, value)| value).chain(&body).chain([&self.url]);
        let is_elsewhere = texts.into_iter().any(|text| text.contains("{key}"));
        let key_header = self.key_header.map(|name| name.to_string());
        let key_header = key_header.or_else(|| (!is_elsewhere).then(|| "idempotency-key".to_owned()));
        let method = self.method.unwrap_or(Method::POST);
        Request { method, url: self.url, headers, body, other_body, other_headers: self.other_header, key_header }
    }
}

impl Request {
    /// The host and port of the service.
    pub(crate) fn address(&self) -> Result<(String, u16), Error> {
        let url =
            Url::parse(&self.url.replace("{key}", "key")).ok().filter(|url| matches!(url.scheme(), "http" | "https"));
        let address = url.and_then(|url| Some((url.host_str()?.to_owned(), url.port_or_known_default()?)));
        address.ok_or_else(|| {
            Error::Argument(format!("the URL of the request must begin with http:// or https://: {}", self.url))
        })
    }
}

fn header(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once(':').ok_or("a header has a name, a colon and a value")?;
    let name = HeaderName::try_from(name.trim()).map_err(|error| error.to_string())?;
    let value = value.trim();
    HeaderValue::try_from(value).map_err(|error| error.to_string())?;
    Ok((name.to_string(), value.to_owned()))
}

fn one_try(text: &str) -> Result<(usize, Interruption), String> {
    let (message, name) = text.split_once(':').ok_or("a number, a colon and an interruption, such as 7:lost-after")?;
    let message = message.parse().map_err(|_| "the number of a message comes first".to_owned())?;
    let names = || Interruption::value_variants().iter().map(|it| it.name()).collect::<Vec<_>>().join(", ");
    let interruption = Interruption::from_str(name, false);
    interruption.map(|it| (message, it)).map_err(|_| format!("the interruptions are {}", names()))
}
