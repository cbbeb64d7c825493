//! The reasons why a request is refused, and the status code of the page that explains the refusal.

use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use pg_idempotency::{Error, Misuse};

use super::pages;
use crate::failure::Failure;

#[derive(Debug, thiserror::Error)]
pub(super) enum Refusal {
    /// A failure. If the failure concerns a key, the variant contains the link of this key.
    #[error("{}", .1.in_one_line())]
    Failure(Option<String>, Failure),
    #[error(
        "this console listens on loopback, and answers only under the names localhost, 127.0.0.1 and [::1]; a reverse \
         proxy has to send one of these as the Host"
    )]
    Host,
    #[error("sign in with your name, and with the token of the console's token file as the password")]
    NotSignedIn,
    #[error(
        "the request has to name one person in the header {0}, and has {1} such headers; open the console through the \
         reverse proxy, which has to overwrite the header and not to add its own"
    )]
    NotOneUser(HeaderName, usize),
    #[error("nothing was done: the form was sent from a page of another site; open the console itself, and repeat")]
    OtherSite,
    #[error("nothing was done: this console is read-only; settle the key on the command line, or at another console")]
    ReadOnly,
    #[error("the console does not know this link, perhaps because it was restarted; look the key up by its parts")]
    UnknownLink,
    #[error("nothing was done: the field {0:?} is empty; go back and fill it in")]
    Empty(&'static str),
    #[error("the console cannot answer this request: {1}; go back, and use the links and forms of its pages")]
    Malformed(StatusCode, String),
}

impl From<Failure> for Refusal {
    fn from(failure: Failure) -> Self {
        Self::Failure(None, failure)
    }
}

impl Refusal {
    fn status(&self) -> StatusCode {
        match self {
            Self::Failure(_, failure) => match failure {
                Failure::NoRecord => StatusCode::NOT_FOUND,
                Failure::Key(_)
                | Failure::NotJson { .. }
                | Failure::Idempotency(Error::Misuse(Misuse::Step { .. }) | Error::Unencodable { .. }) => {
                    StatusCode::BAD_REQUEST
                }
                Failure::Leased { .. }
                | Failure::NotToBeSettled { .. }
                | Failure::StepsInDoubt { .. }
                | Failure::StepNotInDoubt { .. }
                | Failure::Changed => StatusCode::CONFLICT,
                Failure::Connection(_)
                | Failure::Login(_)
                | Failure::Silence(_)
                | Failure::Unanswered
                | Failure::LostInDecision(_)
                | Failure::Full(_)
                | Failure::Idempotency(Error::SchemaMissing { .. }) => StatusCode::SERVICE_UNAVAILABLE,
                _ => StatusCode::INTERNAL_SERVER_ERROR,
            },
            Self::NotSignedIn => StatusCode::UNAUTHORIZED,
            Self::Host | Self::NotOneUser(..) | Self::OtherSite | Self::ReadOnly => StatusCode::FORBIDDEN,
            Self::UnknownLink => StatusCode::NOT_FOUND,
            Self::Empty(_) => StatusCode::BAD_REQUEST,
            Self::Malformed(status, _) => *status,
        }
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let status = self.status();
        let link = if let Self::Failure(link, _) = &self { link.as_deref() } else { None };
        let mut response = (status, pages::refused(status, &self.to_string(), link)).into_response();
        if matches!(self, Self::NotSignedIn) {
            let challenge = HeaderValue::from_static(r#"Basic realm="idempotency-janitor console", charset="UTF-8""#);
            response.headers_mut().insert(header::WWW_AUTHENTICATE, challenge);
        }
        response
    }
}
