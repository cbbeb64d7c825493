//! The service as a process that the check starts, kills, and starts again.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::future::join;
use rustix::process::{Pid, Signal, kill_process_group};
use tokio::io::{AsyncBufReadExt as _, AsyncRead, BufReader};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

use crate::Error;

/// How long a service may take until it listens.
pub(crate) const START: Duration = Duration::from_secs(60);
/// How long the processes of a killed group may take to release the port and the pipe into which they write.
const FREE: Duration = Duration::from_secs(5);
/// The number of the last lines of the service's output that an error contains.
const LINES: usize = 20;

pub(crate) struct Service {
    command: Vec<String>,
    environment: (String, String),
    /// The host and the port in the URL of the service.
    address: (String, u16),
    running: Option<Running>,
    /// How many times the service has ended although the check had not killed it.
    pub(crate) deaths: usize,
    log: Arc<Mutex<VecDeque<String>>>,
}

struct Running {
    child: Child,
    group: Pid,
}

impl Drop for Running {
    fn drop(&mut self) {
        // `kill_process_group` fails if the whole group has ended already.
        let _ = kill_process_group(self.group, Signal::KILL);
        // A killed process ends soon, and its port is free only after that.
        let killed = Instant::now();
        while matches!(self.child.try_wait(), Ok(None)) && killed.elapsed() < FREE {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Service {
    pub(crate) fn new(command: Vec<String>, environment: (String, String), address: (String, u16)) -> Self {
        Self { command, environment, address, running: None, deaths: 0, log: Arc::default() }
    }

    pub(crate) fn command(&self) -> &[String] {
        &self.command
    }

    /// Starts the service like [`Service::start`]. Fails if another process already listens at the address.
    pub(crate) async fn start_first(&mut self) -> Result<(), Error> {
        let (host, port) = &self.address;
        if listens(host, *port).await {
            return Err(Error::Service(format!("another process already listens on {host}:{port}")));
        }
        self.start().await
    }

    /// Starts the service, and waits until it listens.
    pub(crate) async fn start(&mut self) -> Result<(), Error> {
        let (host, port) = &self.address;
        let program = &self.command[0];
        let mut child = Command::new(program)
            .args(&self.command[1..])
            .env(&self.environment.0, &self.environment.1)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // A signal to the group also reaches the processes that the service starts.
            .process_group(0)
            .spawn()
            .map_err(|error| Error::Service(format!("{program} cannot be started: {error}")))?;
        let reading = join(self.collect(child.stdout.take()), self.collect(child.stderr.take()));
        let group = child.id().and_then(|id| Pid::from_raw(id.cast_signed()));
        let group = group.ok_or_else(|| Error::Service(format!("{program} ended at once")))?;
        let running = self.running.insert(Running { child, group });
        let started = Instant::now();
        let mut pause = Duration::from_millis(5);
        while !listens(host, *port).await {
            if let Ok(Some(status)) = running.child.try_wait() {
                // The last lines of the output may still be in the pipe. The wait is limited, because a process that
                // the service has left behind may keep the pipe open.
                let _ = timeout(FREE, reading).await;
                return Err(Error::Service(format!("the service ended with {status}{}", self.wrote())));
            }
            if started.elapsed() > START {
                let wrote = self.wrote();
                return Err(Error::Service(format!("the service does not listen on {host}:{port}{wrote}")));
            }
            sleep(pause).await;
            pause = (pause * 2).min(Duration::from_millis(100));
        }
        Ok(())
    }

    /// Sends SIGKILL to the whole process group of the service. Returns once the port of the service is free,
    /// or after `FREE`.
    pub(crate) async fn kill(&mut self) {
        if self.running.take().is_some() {
            let killed = Instant::now();
            while listens(&self.address.0, self.address.1).await && killed.elapsed() < FREE {
                sleep(Duration::from_millis(5)).await;
            }
        }
    }

    /// Starts the service again each time that it ends by itself, as a supervisor does. Returns only if an error
    /// occurs.
    pub(crate) async fn keep(&mut self) -> Result<Infallible, Error> {
        loop {
            if let Some(running) = &mut self.running {
                let _ = running.child.wait().await;
            }
            self.revive().await?;
        }
    }

    /// Starts the service again if its process has ended by itself.
    pub(crate) async fn revive(&mut self) -> Result<(), Error> {
        let has_ended = |running: &mut Running| !matches!(running.child.try_wait(), Ok(None));
        if self.running.as_mut().is_none_or(has_ended) {
            self.deaths += 1;
            self.kill().await;
            self.start().await?;
        }
        Ok(())
    }

    fn collect(&self, from: Option<impl AsyncRead + Unpin + Send + 'static>) -> JoinHandle<()> {
        let log = self.log.clone();
        tokio::spawn(async move {
            let Some(from) = from else { return };
            let mut lines = BufReader::new(from).lines();
            while let Ok(Some(line)) = lines.next_line().await {
                let mut log = log.lock().unwrap_or_else(PoisonError::into_inner);
                log.push_back(line);
                if log.len() > LINES {
                    log.pop_front();
                }
            }
        })
    }

    /// The last lines of the service's output, for an error.
    pub(crate) fn wrote(&self) -> String {
        let log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        if log.is_empty() {
            return ", and wrote nothing".to_owned();
        }
        format!(", and wrote last: {}", log.iter().cloned().collect::<Vec<_>>().join(" / "))
    }
}

pub(crate) async fn listens(host: &str, port: u16) -> bool {
    let connecting = TcpStream::connect((host.trim_matches(['[', ']']), port));
    timeout(Duration::from_secs(1), connecting).await.is_ok_and(|connected| connected.is_ok())
}
