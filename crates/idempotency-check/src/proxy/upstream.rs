//! The connection from the proxy to the database, with or without TLS, as the URL demands.

use std::io;
use std::sync::Arc;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use tokio_rustls::rustls::crypto::{CryptoProvider, ring};
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use tokio_rustls::rustls::{self, ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};

use crate::wire::{Address, Message, Stream};

/// The code of AuthenticationSASL.
const SASL: [u8; 4] = [0, 0, 0, 10];

pub(crate) struct Upstream {
    address: Address,
    tls: Option<(TlsConnector, ServerName<'static>)>,
}

/// What `sslmode` demands of the server's certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Trust {
    /// Any certificate, for `sslmode=require`.
    Anything,
    /// A certificate for the name of the server, from an authority in this file. `None` means the certificate
    /// authorities that the operating system trusts.
    Verified(Option<String>),
}

impl Upstream {
    pub(crate) fn plain(address: Address) -> Self {
        Self { address, tls: None }
    }

    pub(crate) fn encrypted(address: Address, trust: Trust) -> io::Result<Self> {
        let Address::Tcp(host, _) = &address else { return Ok(Self::plain(address)) };
        let name = ServerName::try_from(host.trim_matches(['[', ']']).to_owned()).map_err(io::Error::other)?;
        let provider = Arc::new(ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .map_err(io::Error::other)?;
        let config = match trust {
            Trust::Anything => config.dangerous().with_custom_certificate_verifier(Arc::new(Unverified(provider))),
            Trust::Verified(authorities) => config.with_root_certificates(roots(authorities.as_deref())?),
        };
        let connector = TlsConnector::from(Arc::new(config.with_no_client_auth()));
        Ok(Self { address, tls: Some((connector, name)) })
    }

    pub(crate) fn is_encrypted(&self) -> bool {
        self.tls.is_some()
    }

    pub(crate) async fn connect(&self) -> io::Result<Stream> {
        let mut stream = self.address.connect().await?;
        let Some((connector, name)) = &self.tls else { return Ok(stream) };
        stream.write_all(Message::ssl_request().bytes()).await?;
        if stream.read_u8().await? != b'S' {
            return Err(io::Error::other("the database does not offer TLS, and sslmode demands it"));
        }
        Ok(Box::new(connector.connect(name.clone(), stream).await?))
    }
}

/// Removes the SASL mechanisms that bind the password to the TLS connection, because the client connects to the proxy
/// without TLS.
pub(crate) fn without_channel_binding(message: &mut Message) {
    if message.kind() != b'R' || !message.body().starts_with(&SASL) {
        return;
    }
    let mut body = SASL.to_vec();
    for mechanism in message.body()[SASL.len()..].split(|&byte| byte == 0).filter(|name| !name.is_empty()) {
        if !mechanism.ends_with(b"-PLUS") {
            body.extend(mechanism);
            body.push(0);
        }
    }
    body.push(0);
    message.set_body(&body);
}

fn roots(file: Option<&str>) -> io::Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    let certificates = match file {
        Some(file) => {
            let read = CertificateDer::pem_file_iter(file).and_then(Iterator::collect::<Result<Vec<_>, _>>);
            read.map_err(|error| io::Error::other(format!("{file} cannot be read: {error}")))?
        }
        None => rustls_native_certs::load_native_certs().certs,
    };
    roots.add_parsable_certificates(certificates);
    Ok(roots)
}

/// Accepts every certificate, as `sslmode=require` does. The crate rustls has no such verifier.
#[derive(Debug)]
struct Unverified(Arc<CryptoProvider>);

impl ServerCertVerifier for Unverified {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.0.signature_verification_algorithms;
        rustls::crypto::verify_tls12_signature(message, certificate, signature, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.0.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_without_tls_is_not_offered_channel_binding() {
        let mut message = Message::new(b'R', b"\0\0\0\x0aSCRAM-SHA-256-PLUS\0SCRAM-SHA-256\0\0");
        without_channel_binding(&mut message);
        assert_eq!(message.body(), b"\0\0\0\x0aSCRAM-SHA-256\0\0");
        let mut ok = Message::new(b'R', &[0; 4]);
        without_channel_binding(&mut ok);
        assert_eq!(ok.body(), [0; 4]);
    }
}
