//! The mistakes of a service, and the errors of its database that a retry would meet again.

use crate::Error;

/// What is wrong with the service. The client sees a 500 `misconfigured` and none of this text.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Misconfigured {
    /// Nothing names the operation of the request.
    #[error(
        "the request has no matched route to name its operation; add the layer by axum's Router::route_layer, with the \
         feature axum, or name the operation: with_route, with_operation"
    )]
    NoOperation,
    /// The handler answered while it, or a task that it spawned, still held the transaction.
    #[error("the handler answered and still holds its IdempotentTx; drop it before the response is returned")]
    TransactionKept,
    /// The handler answered below 400 without having taken the transaction, so its effects would not commit together with the
    /// key. Let it take its [`IdempotentTx`](super::IdempotentTx). If it has no effects in this database, use
    /// [`with_optional_transaction`](super::IdempotencyLayer::with_optional_transaction).
    #[error(
        "the handler succeeded without its IdempotentTx, so its effects would not commit with the key; let it take the \
         IdempotentTx, or use with_optional_transaction for handlers without effects in this database"
    )]
    TransactionNotTaken,
    /// The handler gave the transaction back and asked for it again. Something inside the layer calls the handler a second
    /// time, and the writes of the first call are still in the transaction. Put the code that retries outside the layer.
    #[error(
        "the IdempotentTx was given back and asked for again, but it is lent once; put the code that retries outside the \
         layer"
    )]
    TransactionTakenAgain,
    /// A statement of the handler failed, and the handler still answered with a success.
    #[error("a statement of the handler failed, but the handler answered with a success; let it answer with an error")]
    TransactionAborted(#[source] Error),
    /// The body of the handler's response failed.
    #[error("the handler's response could not be read to its end: {0}")]
    BrokenResponse(String),
    /// A gRPC response did not reach its status, which comes last, within a second or within 4 MiB (or the [limit for
    /// responses](super::IdempotencyLayer::with_response_limit), if that is larger). Nothing is committed, because the call
    /// may still fail. Long streams do not belong behind the layer.
    #[error(
        "the gRPC response did not reach its status in time, or within the limit, so the call may still fail; keep long \
         streams away from the layer"
    )]
    GrpcStatusTooLate,
    /// The response could not be sealed.
    #[error("the response could not be sealed")]
    Unsealable(#[source] crate::BoxError),
    /// The database refused a statement of this crate or the COMMIT, and would refuse it again: a deferred constraint, a
    /// missing privilege (42501), a key with characters outside the database's encoding (22P05).
    #[error("the database refused a statement or the commit, and would refuse it again")]
    DatabaseRefused(#[source] Error),
    /// Any other error of this crate: the table is missing, or the stored fingerprint is of an unknown version or choice.
    #[error(transparent)]
    Refused(#[from] Error),
}
