use std::fmt::Display;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::Error;
use crate::client::{Answer, Caller, Calling, Http, Request, Variant};
use crate::database::Database;
use crate::effects::Effects;
use crate::judge::{Compare, Interruption};
use crate::proxy::Proxy;
use crate::report::Report;
use crate::run::{Options, Progress, Run};
use crate::service::{START, Service, listens};
use crate::talk::ATTEMPT;

/// A check of one request. The crate's documentation has an example.
pub struct Check {
    database: String,
    effects: Option<String>,
    effects_command: Option<String>,
    listen: SocketAddr,
    options: Options,
    target: Option<Target>,
}

enum Target {
    Function(Box<dyn Fn(String, String) -> Calling<'static>>),
    Http { request: Request, command: Vec<String>, variable: String },
}

/// Calls a function of the test instead of sending HTTP requests.
struct Function<'a> {
    url: String,
    call: &'a dyn Fn(String, String) -> Calling<'static>,
}

impl Caller for Function<'_> {
    fn call<'a>(&'a self, key: &str, variant: Variant) -> Option<Calling<'a>> {
        (variant == Variant::Plain).then(|| (self.call)(self.url.clone(), key.to_owned()))
    }
}

impl Check {
    /// A check with the default settings, such as [`again`](Self::again) and [`patience`](Self::patience).
    #[must_use]
    pub fn new(database_url: impl Into<String>) -> Self {
        let options = Options {
            again: vec![202, 409, 425, 429, 500, 502, 503, 504],
            patience: Duration::from_secs(30),
            compare: Compare::Body,
            only: None,
            progress: Box::new(|_| {}),
        };
        Self {
            database: database_url.into(),
            effects: None,
            effects_command: None,
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            options,
            target: None,
        }
    }

    /// The query that shows the effects. For each number of the result, the check compares the change that a request
    /// makes. `{key}` in the query stands for the key.
    #[must_use]
    pub fn effects(self, query: impl Into<String>) -> Self {
        Self { effects: Some(query.into()), ..self }
    }

    /// A shell command that prints effects outside the database, one row on each line.
    #[must_use]
    pub fn effects_command(self, command: impl Into<String>) -> Self {
        Self { effects_command: Some(command.into()), ..self }
    }

    /// The function that sends the request. Its arguments are a database URL, which leads through the proxy, and the
    /// key. An error means that no answer came. If the function starts a service, start the service only in the first
    /// call, with the URL of that call.
    #[must_use]
    pub fn call<F, E>(self, call: F) -> Self
    where
        F: AsyncFn(String, String) -> Result<Answer, E> + 'static,
        E: Display,
    {
        let call = Rc::new(call);
        let function = move |url, key| -> Calling<'static> {
            let call = call.clone();
            Box::pin(async move { call(url, key).await.map_err(|error| error.to_string()) })
        };
        Self { target: Some(Target::Function(Box::new(function))), ..self }
    }

    /// Sends HTTP requests to a service. If `command` is not empty, the check starts the service with this command.
    pub(crate) fn http(self, request: Request, command: Vec<String>, variable: String) -> Self {
        Self { target: Some(Target::Http { request, command, variable }), ..self }
    }

    /// The statuses after which a client retries. The default is 202, 409, 425, 429, 500, 502, 503 and 504.
    #[must_use]
    pub fn again(mut self, statuses: impl Into<Vec<u16>>) -> Self {
        self.options.again = statuses.into();
        self
    }

    /// How long a client retries. The default is 30 seconds.
    #[must_use]
    pub fn patience(mut self, patience: Duration) -> Self {
        self.options.patience = patience;
        self
    }

    /// How answers are compared. The default compares every byte. [`Compare::Status`] is for services whose replays
    /// contain a time or the present state. With `Compare::Status`, the check overlooks an answer with the id of
    /// another payment.
    #[must_use]
    pub fn compare(mut self, compare: Compare) -> Self {
        self.options.compare = compare;
        self
    }

    /// Repeats one try.
    #[must_use]
    pub fn only(mut self, message: usize, interruption: Interruption) -> Self {
        self.options.only = Some((message, interruption));
        self
    }

    /// Calls this function with each line about the progress.
    #[must_use]
    pub fn progress(self, progress: impl Fn(&str) + 'static) -> Self {
        self.on_progress(move |step| match step {
            Progress::Line(line) | Progress::Tried { line, .. } => progress(line),
        })
    }

    pub(crate) fn on_progress(mut self, progress: impl Fn(Progress<'_>) + 'static) -> Self {
        self.options.progress = Box::new(progress);
        self
    }

    /// The address at which the proxy listens. The default is a free port of 127.0.0.1.
    #[must_use]
    pub fn listen(self, listen: SocketAddr) -> Self {
        Self { listen, ..self }
    }

    /// Runs the check. Findings are not errors. The report contains them.
    ///
    /// # Errors
    ///
    /// Returns an error if the check cannot run, for one of these reasons:
    ///
    /// - The database or the service does not answer.
    /// - The effects cannot be read.
    /// - The service does not use the proxy.
    /// - The requests without an interruption fail, change nothing, or differ from each other.
    pub async fn run(self) -> Result<Report, Error> {
        let Some(target) = self.target else { return Err(Error::Argument("there is nothing to call".to_owned())) };
        if self.effects.is_none() && self.effects_command.is_none() {
            return Err(Error::Argument("neither a query nor a command shows the effects".to_owned()));
        }
        let database = Database::parse(&self.database)?;
        let mut effects = Effects::new(database.options.clone(), self.effects, self.effects_command);
        effects.reach().await?;
        let proxy = Proxy::open(self.listen, database.upstream()?).await.map_err(Error::Proxy)?;
        let url = database.through(SocketAddr::new(self.listen.ip(), proxy.port()));
        match target {
            Target::Function(call) => {
                let caller = Function { url, call: &*call };
                Run::new(&proxy, &caller, None, effects, &self.options).await?.run().await
            }
            Target::Http { request, command, variable } => {
                let (host, port) = request.address()?;
                let (http_url, method) = (request.url.clone(), request.method.to_string());
                let caller = Http::new(request, ATTEMPT)?;
                let service = if command.is_empty() {
                    let line = format!("waiting for a service with {variable}={url}");
                    (self.options.progress)(Progress::Line(&line));
                    until_it_listens(&host, port).await?;
                    None
                } else {
                    Some(Service::new(command, (variable, url), (host, port)))
                };
                let run = Run::new(&proxy, &caller, service, effects, &self.options).await?;
                let mut report = run.run().await?;
                (report.service.url, report.service.method) = (http_url, method);
                Ok(report)
            }
        }
    }
}

async fn until_it_listens(host: &str, port: u16) -> Result<(), Error> {
    let started = Instant::now();
    while !listens(host, port).await {
        if started.elapsed() > START {
            return Err(Error::Service(format!("no service listens on {host}:{port}")));
        }
        sleep(Duration::from_millis(100)).await;
    }
    Ok(())
}
