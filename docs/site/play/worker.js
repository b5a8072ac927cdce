// Runs Python in a worker of its own. python.js starts it and sends the files first, then requests.

let python = null;

self.onmessage = async ({ data }) => {
  try {
    if (data.files) {
      await start(await unpack(data.files));
      self.postMessage({ isReady: true });
    } else {
      self.postMessage({ number: data.number, answer: python(data.request) });
    }
  } catch (error) {
    self.postMessage({ number: data.number, failure: String(error.message ?? error) });
  }
};

/** Deflated base64 -> ArrayBuffer of each file. */
async function unpack(files) {
  const unpacked = {};
  for (const [name, text] of Object.entries(files)) {
    const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    unpacked[name] = await new Response(stream).arrayBuffer();
  }
  return unpacked;
}

async function start(files) {
  const textOf = (name) => new TextDecoder().decode(files[name]);
  const load = (name) => import(`data:text/javascript,${encodeURIComponent(textOf(name))}`);
  // Pyodide fetches its files from indexURL: they are here already
  self.fetch = async (url) => {
    const name = String(url).split("/").at(-1);
    return new Response(files[name], { headers: { "content-type": name.endsWith(".wasm") ? "application/wasm" : "application/zip" } });
  };
  const { loadPyodide } = await load("pyodide.mjs");
  const { default: createPyodideModule } = await load("pyodide.asm.mjs");
  const lockFileContents = JSON.parse(textOf("pyodide-lock.json"));
  const pyodide = await loadPyodide({ indexURL: "https://pyodide.invalid/", createPyodideModule, lockFileContents });
  pyodide.FS.writeFile("/zeropipe.zip", new Uint8Array(files["zeropipe.zip"]));
  pyodide.runPython("import sys; sys.path.insert(0, '/zeropipe.zip')");
  python = pyodide.pyimport("results").answer;
}
