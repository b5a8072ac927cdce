// Python behind the page: its files are scripts, since a page that is opened as a file cannot fetch.

const received = {}; // file name -> deflated base64
globalThis.receiveFile = (name, text) => (received[name] = text);

function loadScript(src) {
  return new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = src;
    script.onload = resolve;
    script.onerror = () => reject(new Error(`${src} is missing: build the site again`));
    document.head.append(script);
  });
}

/** A function that answers requests; the next one may be sent before an answer is there. */
async function startPython(files) {
  await Promise.all(files.map((name) => loadScript(`python/${name}.js`)));
  // a page that is opened as a file may start a worker from a data URL only
  const worker = new Worker(`data:text/javascript,${encodeURIComponent(WORKER)}`, { type: "module" });
  const waiting = new Map(); // number of a request -> [resolve, reject]
  let sent = 0;
  await new Promise((resolve, reject) => {
    worker.onmessage = ({ data }) => (data.isReady ? resolve() : reject(new Error(data.failure)));
    worker.onerror = (event) => reject(new Error(event.message || "the worker does not start"));
    worker.postMessage({ files: received });
  });
  for (const name of Object.keys(received)) delete received[name];
  worker.onmessage = ({ data }) => {
    const [resolve, reject] = waiting.get(data.number);
    waiting.delete(data.number);
    if (data.failure) reject(new Error(data.failure));
    else resolve(JSON.parse(data.answer));
  };
  return (request) =>
    new Promise((resolve, reject) => {
      sent += 1;
      waiting.set(sent, [resolve, reject]);
      worker.postMessage({ number: sent, request: JSON.stringify(request) });
    });
}
