//! Finishes requests whose clients do not come back. A resumer takes a request over, sends it to the service, and
//! stores the answer.

use std::fmt::Display;
use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::Full;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tower_service::Service;
use tracing::Instrument as _;

use super::body::ByteBody;
use super::extensions::FromResumer;
use super::handler::{Handler, Ran};
use super::layer::{IdempotencyLayer, LayerMode};
use super::leased::perform;
use super::request::restored;
use crate::background::{Next, Passes, Shutdown, caught, unless};
use crate::lease::{INTERVAL, Lease, LeaseOptions, LeaseOwner, Search, assert_interval};
use crate::observe::{FAILED, PERFORMED, REFUSED};
use crate::record::{Candidate, StoredAs};
use crate::route::{check_operation, has_names};
use crate::session::ended_or_closed;
use crate::{BoxError, Error, Key, Misuse, observe};

/// The number of requests that one resumer sends at a time, each in a loop of its own. These requests compete with
/// clients that wait.
const AT_A_TIME: usize = 4;

/// Finishes those requests of a leased layer whose clients do not come back. Run a resumer in each process of a fleet,
/// or in one process. `examples/http_resumer.rs` is a service with a resumer.
#[derive(Clone, Debug)]
pub struct RequestResumer {
    layer: IdempotencyLayer,
    operation: String,
    interval: Duration,
}

impl RequestResumer {
    /// A resumer for the requests of one operation behind this layer, for example `POST /payments` or `POST
    /// /accounts/{}/pay`. If the layer has the name of a [`service`](IdempotencyLayer::service), the resumer adds this
    /// name. **The database is the name space of operations**, so without a name, the resumer also finds the requests
    /// of other services in the database.
    ///
    /// # Errors
    ///
    /// [`Error::Misuse`] in each of these cases:
    ///
    /// - The layer stores no requests.
    /// - The policy is `AtMostOnce`, or the options have no [`max_attempts`](crate::lease::LeaseOptions::max_attempts).
    /// - The operation contains a `{name}`, but no function [`operation`](IdempotencyLayer::operation) names the
    ///   layer's operations.
    /// - The operation begins with the name of the layer's service.
    /// - No [`Key`] can have the operation.
    pub fn new(layer: &IdempotencyLayer, operation: &str) -> Result<Self, Error> {
        layer.resumable()?;
        Ok(Self { layer: layer.clone(), operation: layer.searched(operation)?, interval: INTERVAL })
    }

    /// Sets the pause after a search that found nothing. The default is 10 seconds.
    ///
    /// # Panics
    ///
    /// Panics if the interval is under 100 ms or over a day.
    #[must_use]
    #[track_caller]
    pub fn interval(self, interval: Duration) -> Self {
        assert_interval(interval);
        Self { interval, ..self }
    }

    /// [Resumes](IdempotencyLayer::resume_one) requests until `shutdown` is ready. Then the resumer finishes the
    /// requests in progress. After an error, the resumer logs the error and goes on.
    ///
    /// The resumer sends up to four requests at a time, but only one request of each scope. **So one slow request
    /// delays all other requests of its scope.** Slow requests of four scopes delay the requests of every scope. So
    /// give each outgoing call of the operation a time-out.
    ///
    /// # Cancellation
    ///
    /// If the future is dropped, the leases of the requests in progress lapse, as after a crash.
    pub async fn run<D, E, S, R>(self, shutdown: impl Future<Output = ()> + Send, decide: D, service: S)
    where
        D: AsyncFnOnce(&Key, &mut Request<Bytes>) -> Result<Decision, E> + Clone,
        E: Display,
        S: Service<Request<Full<Bytes>>, Response = Response<R>, Error: Send, Future: Send> + Clone + Send + 'static,
        S::Error: 'static,
        R: http_body::Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
    {
        let (stop, stopped) = watch::channel(());
        let attempts_one_at_a_time = |_| async {
            let mut stopped = stopped.clone();
            let shutdown = pin!(async move { drop(stopped.changed().await) });
            let mut passes = Passes::of("resuming a request", Some(&self.operation), self.interval, shutdown);
            while passes.next().await {
                let pass = async {
                    let resuming = self.resume(&mut passes.shutdown, decide.clone(), service.clone());
                    Ok(resuming.await?.map_or(Next::LATER, |_| Next::AtOnce))
                };
                let ended = caught(pass).await;
                passes.ended(ended);
            }
        };
        let mut loops: Vec<_> = (0..AT_A_TIME).map(attempts_one_at_a_time).map(Box::pin).collect();
        let mut all = pin!(poll_fn(|context| {
            loops.retain_mut(|each| each.as_mut().poll(context).is_pending());
            if loops.is_empty() { Poll::Ready(()) } else { Poll::Pending }
        }));
        if unless(&mut pin!(shutdown), all.as_mut()).await.is_none() {
            drop(stop);
            all.await;
        }
    }

    /// Does the work of [`IdempotencyLayer::resume_one`]. A shutdown ends the search, but not an attempt.
    async fn resume<D, E, S, R>(
        &self,
        shutdown: &mut Shutdown<'_>,
        decide: D,
        service: S,
    ) -> Result<Option<ResumedRequest>, Error>
    where
        D: AsyncFnOnce(&Key, &mut Request<Bytes>) -> Result<Decision, E> + Clone,
        E: Display,
        S: Service<Request<Full<Bytes>>, Response = Response<R>, Error: Send, Future: Send> + Send + 'static,
        S::Error: 'static,
        R: http_body::Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
    {
        let (layer, operation) = (&self.layer, &*self.operation);
        let mut search = Search::of(&layer.pool, layer.resumable()?, operation, StoredAs::Envelope)?;
        while let Some(candidate) = search.next(shutdown).await? {
            // The places are taken before the claim. If no place is free, the candidate stays for a later search.
            let Some(run) = layer.runs.begin_resumed(&candidate.key, layer.bounds()) else { continue };
            let Some((stored, mut request)) = stored(&search, &candidate).await? else { continue };
            let deciding = caught(decide.clone()(&candidate.key, &mut request));
            let end = shutdown.or_after(layer.run_timeout, Duration::ZERO);
            let error = match ended_or_closed(end, deciding).await {
                Some(Ok(Ok(Decision::Resume))) => {
                    let Some((owner, _)) = search.take(&candidate, Some(&stored)).await? else { continue };
                    let layer = layer.clone();
                    // The attempt has a task of its own, so that a busy handler does not delay other attempts. A drop
                    // of the set ends the task.
                    let mut task = JoinSet::new();
                    let attempt = async move {
                        let _run = run;
                        answer(&layer, owner, Handler::new(service, request.map(Full::new))).await
                    };
                    task.spawn(attempt.in_current_span());
                    let answered = task.join_next().await.and_then(Result::ok).flatten();
                    return Ok(Some(match answered {
                        Some(status) => ResumedRequest::Answered(candidate.key, status),
                        None => ResumedRequest::Failed(candidate.key),
                    }));
                }
                Some(Ok(Ok(Decision::Refuse(reason)))) if refuse(&search, &candidate, &reason).await? => {
                    return Ok(Some(ResumedRequest::Refused(candidate.key)));
                }
                Some(Ok(Ok(Decision::Refuse(_)))) => continue,
                Some(Ok(Err(error))) => error.to_string(),
                Some(Err(_)) => "the function panicked".to_owned(),
                None if shutdown.is_ready().await => return Ok(None),
                None => "the function took too long".to_owned(),
            };
            tracing::error!(operation, error, "a stored request could not be decided, and is asked about later");
        }
        Ok(None)
    }
}

/// Returns the stored bytes of the request, and the request that is made from these bytes. Returns `None` if the record
/// has changed since the search, or if the stored request is damaged.
async fn stored(search: &Search<'_>, found: &Candidate) -> Result<Option<(Vec<u8>, Request<Bytes>)>, Error> {
    let reading = search.on_record(found, async |record, conn| record.request(conn, found.token).await);
    let Some(stored) = reading.await? else { return Ok(None) };
    let request = restored(&stored);
    if request.is_none() {
        let (operation, token) = (found.key.operation(), found.token);
        tracing::error!(
            operation,
            token,
            "a stored request is damaged; `unsettled --abandoned-for` lists its operation"
        );
    }
    Ok(request.map(|request| (stored, request)))
}

/// Stores the service's refusal. Returns `false` if the record has changed since the search.
async fn refuse(search: &Search<'_>, found: &Candidate, reason: &str) -> Result<bool, Error> {
    let (operation, token) = (found.key.operation(), found.token);
    let refusing = search.on_record(found, async |record, conn| record.refuse_request(conn, token, reason).await);
    let refused = refusing.await?;
    if refused {
        tracing::warn!(operation, token, "the service refused a stored request, which waits for an operator");
        observe::resumed(operation, REFUSED);
    }
    Ok(refused)
}

/// Sends the request to the service. Returns the status of the answer if the layer has stored the answer.
async fn answer<R: ByteBody, E>(
    layer: &IdempotencyLayer,
    owner: LeaseOwner,
    mut handler: Handler<R, E>,
) -> Option<StatusCode> {
    let lease = Lease::clone(&owner);
    handler.extensions.insert(lease.key().clone());
    handler.extensions.insert(FromResumer::new(lease.key().clone()));
    let ran = perform(layer, owner, handler).await;
    let stored = matches!(ran, Ok(Ran::Performed(_)));
    lease.count_resumed(if stored { PERFORMED } else { FAILED });
    let status = ran.ok().map(|ran| ran.into_response().status());
    if !stored {
        let (operation, token, attempt) = (lease.key().operation(), lease.token(), lease.attempt());
        let status = status.map(|status| status.as_u16());
        tracing::warn!(operation, token, attempt, status, "a resumed request failed; its record has the reason");
    }
    status.filter(|_| stored)
}

/// The decision of the service about a stored request, before its operation is claimed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// The user may still perform the operation, so the request is resumed.
    Resume,
    /// The request is never resumed. The text is the reason. The refusal uses up no attempt, and the record forgets the
    /// request. The `last_error` of the record is `refused: …`, and [`unsettled`](crate::operator::unsettled) lists the
    /// record. If the client retries the request, the retry is performed.
    Refuse(String),
}

/// How the resumption of a request ended.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ResumedRequest {
    /// The service answered with this status. If the layer has stored the answer, a retry of the client gets it.
    Answered(Key, StatusCode),
    /// The service refused the request before its operation was claimed.
    Refused(Key),
    /// The attempt failed. The next attempt comes later, unless this was the last attempt, or a 4xx has refused the
    /// request. An attempt also fails if the layer in the service finds [another
    /// key](super::Rejection::Misconfigured) for the request than the record has. The request is then not performed.
    Failed(Key),
}

impl IdempotencyLayer {
    /// Takes over one abandoned request of this operation, sends it to `service`, and stores the answer as this layer
    /// does. As in [`RequestResumer::new`](super::RequestResumer::new), the operation has no name of the service. A
    /// request is abandoned if its claim has lapsed or was released, and its client has not come back for the
    /// time of [`resume_after`](LeaseOptions::resume_after). A resumed request counts as a run, so it needs a
    /// [place](Self::max_runs). `None` means that there is no abandoned request, or that no place is free. For each
    /// operation, a process resumes one request of each scope at a time.
    ///
    /// First, `decide` gets the key and the request. `decide` uses the scope of the key to find out whether the user
    /// may still perform the operation. `decide` also adds to the request the extensions or headers that the service's
    /// authentication would have added. The key is not claimed yet, so `decide` may be called again for a request, also
    /// by another resumer at the same time. If `decide` returns an error, panics, or takes longer than the [time of a
    /// run](Self::run_timeout), the request is left for a later search.
    ///
    /// The resumed request has the method, the path with the query, the body and the [stored
    /// headers](Self::store_header) of the client's request. The extensions of the request contain the [`Key`] and the
    /// [`Lease`], so that this layer passes the request on. `service` is **the router without its authentication**. The
    /// authentication would answer 401, which is a final refusal, and the record would then forget the request.
    ///
    /// # Errors
    ///
    /// [`Error::Misuse`] in the cases that [`RequestResumer::new`](super::RequestResumer::new) lists, and errors of the
    /// database.
    ///
    /// # Cancellation
    ///
    /// The consequences are those of a cancelled [`LeaseOptions::resume_one`].
    pub async fn resume_one<D, E, S, R>(
        &self,
        operation: &str,
        decide: D,
        service: S,
    ) -> Result<Option<ResumedRequest>, Error>
    where
        D: AsyncFnOnce(&Key, &mut Request<Bytes>) -> Result<Decision, E> + Clone,
        E: Display,
        S: Service<Request<Full<Bytes>>, Response = Response<R>, Error: Send, Future: Send> + Send + 'static,
        S::Error: 'static,
        R: http_body::Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
    {
        RequestResumer::new(self, operation)?.resume(&mut Shutdown::Never, decide, service).await
    }

    /// Returns the operation as the records have it, for a search.
    fn searched(&self, operation: &str) -> Result<String, Error> {
        if self.operation.is_none() && has_names(operation) {
            // If `operation` contains the name of a parameter, the search would find nothing, and would return no
            // error.
            let problem = "a layer without IdempotencyLayer::operation leaves the names of parameters out; write \
                           {} for each {name}, and {*} for each {*name}, as in POST /accounts/{}/pay";
            return Err(Misuse::options(problem));
        }
        // With the name twice, the search would also find nothing.
        let rest = self.service.as_ref().and_then(|name| operation.strip_prefix(&**name)?.strip_prefix(' '));
        if rest.is_some_and(|rest| !rest.starts_with('/')) {
            let problem = "the layer adds the name of its service; give the operation without this name";
            return Err(Misuse::options(problem));
        }
        let recorded = self.recorded_operation(operation);
        check_operation(&recorded)?;
        Ok(recorded)
    }

    fn resumable(&self) -> Result<LeaseOptions, Error> {
        match self.mode {
            LayerMode::Leased(options) if options.stores_requests() => options.resumable_attempts().map(|_| options),
            _ => Err(Misuse::options(
                "the requests are not stored; use a leased layer with LeaseOptions::store_request(true)",
            )),
        }
    }
}
